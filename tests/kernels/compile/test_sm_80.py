"""Every kernel, at every tile of the table, compiled for sm_80."""

import pytest
from entries import VARIANTS, check_cuda, names
from harness import compiling_for


@pytest.mark.parametrize("name", names("sm_80"))
def test_code(name, recorded_facts, record_property):
    check_cuda("sm_80", name, recorded_facts, record_property)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "fp8" in name])
def test_float8_is_refused(name):
    with compiling_for("sm_80"), pytest.raises(ValueError, match=r"k_cache must be .* below compute capability 8\.9"):
        VARIANTS[name]()
