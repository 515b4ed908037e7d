"""`vllm_v1` decides as vLLM's own scheduler did, step by step; its decisions are in decisions/vllm.txt.xz."""

import golden
import pytest
import works

from schedlab.policies.vllm_v1 import VLLMV1


def decided(setting):
    asked = works.work(setting.kind, setting.seed)
    return works.on_ours(VLLMV1(order=setting.order), asked, blocks=setting.blocks, caching=setting.caching)


def differing(of_order, seeds):
    """Settings without a cache at which ours and theirs part, each with the step, and how many there are in all."""
    _, runs = golden.load("vllm")
    mine = {s: text for s, text in runs.items() if s.order == of_order and not s.caching and s.seed in seeds}
    found = {}
    for setting, text in mine.items():
        theirs = works.read(text)
        at = works.first_difference(decided(setting), theirs)
        if at is not None:
            found[setting] = theirs[at]
    return found, len(mine)


def test_in_arrival_order_every_step_is_equal():
    assert differing("fcfs", range(1)) == ({}, 10)


def test_by_priority_every_step_is_equal():
    assert differing("priority", range(1, 2)) == ({}, 10)


@pytest.mark.full
def test_in_arrival_order_every_step_of_every_run_is_equal():
    assert differing("fcfs", range(works.SEEDS)) == ({}, 200)


@pytest.mark.full
def test_by_priority_only_empty_steps_differ():
    """Where vLLM's first to be served preempts itself it runs nothing, and ours serves the next."""
    found, total = differing("priority", range(works.SEEDS))
    assert total == 200 and len(found) == 3
    assert all(not grants and victims for grants, victims in found.values())


def test_an_empty_step_of_theirs_serves_the_next():
    _, runs = golden.load("vllm")
    setting = golden.Setting("open long", 6, works.TIGHT, "priority")
    theirs, ours = works.read(runs[setting]), decided(setting)
    at = works.first_difference(ours, theirs)
    assert theirs[at][0] == {} and ours[at][0] and ours[at][1] == theirs[at][1]


def test_what_is_kept_can_be_read_and_written():
    version, runs = golden.load("vllm")
    assert version.startswith("vLLM 0.") and len(runs) == 500
    text = next(iter(runs.values()))
    assert works.written(works.read(text)) == text
