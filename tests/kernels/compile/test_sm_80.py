"""Every kernel, at every tile of the table, compiled for sm_80."""

import pytest
from entries import ENTRIES, check_cuda


@pytest.mark.parametrize("name", ENTRIES["sm_80"])
def test_code(name, recorded_facts, record_property):
    check_cuda("sm_80", name, recorded_facts, record_property)
