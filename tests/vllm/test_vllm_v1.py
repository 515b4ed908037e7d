"""vLLM's scheduler on fake outputs, beside `policy=vllm_v1` on our engine, and what of it is committed."""

import sys
from pathlib import Path

import pytest
import rig  # noqa: F401 - skips where vLLM is not importable

sys.path.insert(0, str(Path(__file__).parents[1] / "baselines"))

import by_vllm
import golden
import works

from schedlab.policies.vllm_v1 import VLLMV1


def compare(setting):
    """Whether both decide the same in every step, up to the first in which vLLM runs nothing."""
    theirs = by_vllm.run(setting)
    ours = works.on_ours(
        VLLMV1(order=setting.order), works.work(setting.kind, setting.seed), blocks=setting.blocks, caching=False
    )
    at = works.first_difference(ours, theirs)
    assert at is None or theirs[at][0] == {}, f"{setting}: they part at step {at}"
    return theirs


@pytest.mark.parametrize("order", ["fcfs", "priority"])
@pytest.mark.parametrize("kind", works.KINDS)
def test_equal_decisions(kind, order):
    for blocks in (works.ROOMY, works.TIGHT):
        compare(golden.Setting(kind, 0, blocks, order))


@pytest.mark.full
def test_equal_decisions_at_every_seed_and_as_committed():
    _, runs = golden.load("vllm")
    assert list(runs) == list(by_vllm.settings())
    for setting, text in runs.items():
        theirs = by_vllm.run(setting) if setting.caching else compare(setting)
        assert works.written(theirs) == text, setting
