"""Every policy that `policy=` offers keeps the contract, with the knobs of its YAML and with knobs that bite."""

from functools import cache

import pytest

from schedlab.experiments.policy import maker, options
from schedlab.experiments.run.compose import compose
from schedlab.testing import PROPERTIES, assert_conforms

OURS = [option.name for option in options() if option.target.startswith("schedlab.policies.")]
TIGHT = {
    "chunked_prefill": ["policy.chunk_size=12"],
    "decode_priority": ["policy.stall_tokens=5", "policy.max_prefill_streak=2", "policy.watermark_blocks=2"],
    "prefix_reuse": ["policy.chunk_size=12", "policy.preempt_mode=swap"],
}
IN_PROCESS = [name for name in PROPERTIES if name not in ("determinism", "cost")]


@cache
def of(name, *words):
    return maker(compose([f"policy={name}", *words]).policy)


def test_all_are_tried():
    assert {"fcfs", "chunked_prefill", "decode_priority", "prefix_reuse"} <= set(OURS)


@pytest.mark.parametrize("name", OURS)
def test_it_conforms(name):
    assert_conforms(of(name), against={"chunked_prefill": of("chunked_prefill")}, seconds=0.5, only=IN_PROCESS)


@pytest.mark.full
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_it_conforms_for_long(name, tight):
    words = TIGHT.get(name, ["policy.preempt_mode=swap"]) if tight else []
    assert_conforms(of(name, *words), against={"fcfs": of("fcfs")}, seconds=40, seed=1)
