"""What becomes of a policy's faults: the run's line and end, or vLLM's own scheduler for that step."""

import pytest
import rig
from scripted import Scripted, everything

from policies import EVERY
from schedlab.framework.errors import PolicyError, PolicyStalled


def test_a_broken_rule_ends_the_run_with_its_line():
    def twice(step):
        step.grant(step.waiting[0], 10)
        step.grant(step.waiting[0], 10)

    run = rig.Run(rig.scheduler_of(Scripted(twice)))
    run.add(rig.Asked("a", [3] * 50, 2))
    with pytest.raises(PolicyError, match="policy Scripted on request a: a second grant in one step"):
        run.step()


def test_a_stall_names_the_head_and_what_it_lacks():
    run = rig.Run(rig.scheduler_of(Scripted(lambda step: None), blocks=10))
    run.add(rig.Asked("a", [3] * 50, 2))
    line = r"granted nothing and did not idle: request a \(waiting\) needs 50 tokens; 16 slots and 10 blocks are free"
    with pytest.raises(PolicyStalled, match=line):
        run.step()


def test_what_a_policy_raises_names_it_and_the_place():
    run = rig.Run(rig.scheduler_of(Scripted(lambda step: 1 / 0)))
    run.add(rig.Asked("a", [3] * 50, 2))
    with pytest.raises(PolicyError, match=r"schedule raised ZeroDivisionError: division by zero \(at .*test_faults"):
        run.step()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("blocks", [199, 30])
def test_fallback_hands_the_step_to_vllm(is_async, blocks, caplog):
    """Every third step breaks, after it has granted, admitted and preempted: all tokens are right all the same."""
    policy, steps = EVERY["chunked_prefill"](), []

    def breaks(step):
        steps.append(1)
        if len(steps) % 3 == 0:
            for request in [*step.running][-1:]:
                step.preempt(request)
            everything_that_fits(step)
            raise RuntimeError("a mistake")
        policy.schedule(step)

    load = rig.load_of(5, 32)
    keys = {"on_fault": "fallback", "is_async": is_async, "blocks": blocks}
    run, tables = rig.recorded(Scripted(breaks), load, **keys)
    run.check(load)
    assert run.scheduler.counters()["fallback_steps"] > 5
    assert tables.summary["requests/finished"] == 32


def everything_that_fits(step):
    step.grant_decodes([r for r in step.decoding if r.state == "running"])
    for request in (*step.prefilling, *step.waiting):
        if request.state != "preempted":
            step.grant(request)


def test_fallback_is_for_faults_of_policies_alone():
    def broken_framework(step):
        raise AssertionError("an invariant")

    run = rig.Run(rig.scheduler_of(Scripted(broken_framework), on_fault="fallback"))
    run.add(rig.Asked("a", [3] * 50, 2))
    with pytest.raises(AssertionError, match="an invariant"):
        run.step()


def test_grants_and_scheduled_tokens_are_compared(monkeypatch):
    """A vLLM whose loop would schedule something else than what was granted is an internal error that names both."""
    scheduler = rig.scheduler_of(Scripted(everything))
    monkeypatch.setattr(type(scheduler), "_reserve_prefill_lookahead", lambda self, request, computed, new: new)
    run = rig.Run(scheduler)
    run.add(rig.Asked("a", [3] * 50, 2))
    scheduler._pilot.policy.decide = lambda step: step.grant(step.waiting[0], 20)
    with pytest.raises(AssertionError, match="a: granted 20 tokens, vLLM wants 50"):
        run.step()
