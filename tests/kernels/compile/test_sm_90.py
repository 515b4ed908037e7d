"""Every kernel, at every tile of the table, compiled for sm_90."""

import pytest
from entries import check_cuda, names


@pytest.mark.parametrize("name", names("sm_90"))
def test_code(name, recorded_facts, record_property):
    check_cuda("sm_90", name, recorded_facts, record_property)
