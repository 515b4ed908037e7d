"""Every kernel compiles for gfx942, attention and products to matrix instructions."""

import re

import pytest
from entries import ATTENTION, ENTRIES, PRODUCT, names
from harness import compiling_for


@pytest.mark.parametrize("name", names("gfx942"))
def test_code(name):
    with compiling_for("gfx942") as compiled:
        ENTRIES["gfx942"][name]()
    assert compiled
    for kernel_name, kernel in compiled:
        assert kernel.asm["hsaco"]
        if kernel_name in (*ATTENTION, PRODUCT):
            assert "v_mfma_" in kernel.asm["amdgcn"]
        if kernel_name == PRODUCT:
            assert set(re.findall(r"\.vgpr_spill_count: *(\d+)", kernel.asm["amdgcn"])) == {"0"}
