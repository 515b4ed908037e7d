"""What the device check compiles beforehand is what it launches: afterwards nothing is left to compile."""

import json

import pytest
from harness import TARGETS

from schedlab.experiments.device import compiling
from schedlab.experiments.device.rows import Device
from schedlab.experiments.device.sections import SECTIONS, resolve

QUICK = ("pointwise", "sampling", "decode")


@pytest.fixture
def sections(request):
    return tuple(section for section in SECTIONS if request.config.getoption("--full", False) or section.name in QUICK)


def launched_again(sections, target: str) -> list[str]:
    """Names of the kernels that a process without a share compiles when it launches everything."""
    with compiling.compilations() as compiled, compiling.launches_compile(TARGETS[target], device=50):
        for section in sections:
            for _ in resolve(section.launches or section.work)(Device("meta")):
                pass
    return compiled


def test_nothing_is_left_to_compile(tmp_path, sections):
    (tmp_path / "machine.json").write_text(json.dumps({"capability": 90}))
    device = Device("cuda", tmp_path)
    with compiling.compilations() as compiled:
        rows = [row for number in range(3) for row in compiling.compile_share(device, sections, number, 3)]
    assert [row.what for row in rows] == ["share 1 of 3", "share 2 of 3", "share 3 of 3"], rows
    assert sum(row.value for row in rows) == len(compiled) > 3 and min(row.value for row in rows) >= 1
    assert launched_again(sections, "sm_90") == []


def test_a_section_that_needs_data_is_named(tmp_path):
    def needs_data(device):
        yield float(device.randn(3).sum())

    with compiling.launches_compile(TARGETS["sm_90"]):
        (row,) = compiling._launched("a:needs_data", needs_data, Device("meta"))
    assert row.what == "needs_data: not compiled beforehand" and "meta" in row.note and row.ok is None


def test_every_section_launches_without_data():
    """Of all sections: what cannot be launched so would be compiled in the minutes on a GPU, one kernel at a time."""
    share = compiling.Share(0, 1 << 30)  # of which there are not as many: compiles none
    with compiling.launches_compile(TARGETS["sm_90"], device=51), compiling.variants(share):
        for path in dict.fromkeys(section.launches or section.work for section in SECTIONS):
            assert not list(compiling._launched(path, resolve(path), Device("meta")))
    assert len(share.seen) > 90
