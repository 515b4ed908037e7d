"""Preempted requests and those around them, each as the smallest run in which engines are known to go wrong."""

import pytest
from four import ALL
from hypothesis import given
from scripted import (
    HOST_BLOCK_GIB,
    MS,
    PART,
    Script,
    ScriptedExecutor,
    check_all_tokens,
    checked,
    grants,
    lab,
    named,
    populated,
)

from schedlab.framework.content import UniqueContent
from schedlab.framework.policy import Policy, Preempted, Progressed
from schedlab.framework.testing.harness import Outcome, Spec, check_streams, run
from schedlab.framework.testing.strategies import limits, specs

# -- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_a_resume_computes_the_prompt_and_what_was_generated(caching):
    """Three tokens came before the preemption: the resume is a prefill over 10 + 3, minus the blocks still cached."""

    def preempt(step):
        step.preempt(step.decoding[0])
        step.idle_until(step.now + 0.001)

    executor = ScriptedExecutor(1)
    made = lab(
        Script(grants(a=None), grants(a=1), grants(a=1), preempt, grants(a=None)),
        [Spec("a", 0, 10, 8)],
        executor=executor,
        enable_prefix_caching=caching,
    )
    made.finish()
    start = 12 // 4 * 4 if caching else 0
    assert executor.batches[3] == ([("a", start, 13 - start)], [])
    assert sum(tokens for prefills, _ in executor.batches for _, _, tokens in prefills) == 10 + 13 - start


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_stream_survives_a_preemption_after_any_token(at, mode):
    def preempt(step):
        step.preempt(step.decoding[0], mode)
        step.idle_until(step.now + 0.001)

    moves = [grants(a=None), *[grants(a=1)] * (at - 1), preempt, lambda step: step.idle_until(step.now + 0.001)]
    made = lab(Script(*moves), [Spec("a", 0, 7, 8)], swap_space_gib=4 * HOST_BLOCK_GIB)
    made.finish()
    assert made["a"].num_output_tokens == 8 and made["a"].num_preemptions == 1
    check_all_tokens(made)


def test_a_victim_of_its_last_token_does_not_finish():
    """Its grant is refunded: it neither finishes nor is freed twice."""

    def move(step):
        d1 = named(step)["d1"]
        assert d1.num_output_tokens == 7
        step.grant_decodes()
        step.preempt(d1)

    made = populated(*[lambda step: step.grant_decodes()] * 6, move)
    made.step(7)
    assert made["d1"].state == "preempted" and made["d1"].num_output_tokens == 7
    assert made["d2"].state == "finished"
    checked(made)
    assert made["d1"].num_output_tokens == 8


@pytest.mark.parametrize("name", ALL)
@PART
@given(trace=specs(max_requests=9, max_prompt=40, max_output=10), keys=limits())
def test_the_oldest_running_request_is_never_the_victim(name, trace, keys):
    """So it gains tokens to its end, however small the pool; and nobody is a victim twice with no token in between."""
    policy = ALL[name]()
    watched = Preempts(policy)
    check_streams(run(watched, trace, **keys))


class Preempts(Policy):
    """Watches another policy's victims."""

    def __init__(self, policy):
        self._policy = policy
        self._running, self._base_tokens, self._last = [], 0, {}

    def schedule(self, step):
        self._running = list(step.running)
        self._policy.schedule(step)

    def observe(self, event):
        self._policy.observe(event)
        if isinstance(event, Progressed):
            self._base_tokens += sum(tokens for _, tokens in event.prefills) + len(event.decodes) * event.steps
        if isinstance(event, Preempted):
            assert event.request is not self._running[0], "the oldest was preempted"
            key = event.request.request_id
            assert self._last.get(key) != self._base_tokens, "preempted twice, and nothing was computed in between"
            self._last[key] = self._base_tokens


@pytest.mark.parametrize("name", ALL)
def test_a_pool_for_one_request_serves_all_of_them(name):
    """Each request alone takes the whole pool at its end: they must run one after another, with little thrown away."""
    trace = [Spec(f"r{i}", i * MS // 2, 12 + i, 21 - i, ids=(7, 7, i), id_width=4) for i in range(8)]
    outcome = run(ALL[name](), trace, num_blocks=8, swap_space_gib=8 * HOST_BLOCK_GIB)
    check_streams(outcome)
    assert {request.state for request in outcome.requests} == {"finished"}
    total = sum(request.num_tokens for request in outcome.requests)
    assert outcome.tables.result["summary"]["recomputed_tokens"] < total
    assert max(request.num_preemptions for request in outcome.requests) <= 8


def test_a_refusal_is_not_remembered():
    """w does not fit while a runs; in the step after a has finished it does."""
    trace = [Spec("a", 0, 12, 2), Spec("w", 0, 9, 1)]

    def refused(step):
        step.grant_decodes()
        assert not step.grant(step.waiting[0]) and step.fits(step.waiting[0]) == 0

    def admitted(step):
        assert step.fits(step.waiting[0]) == 9 and step.grant(step.waiting[0])

    made = lab(Script(grants(a=None), refused, admitted), trace, num_blocks=4)
    made.finish()


def test_a_later_request_of_the_same_name_never_adopts_what_an_earlier_one_generated():
    """Neither prompt has an identity, both are preempted, and only their names are equal."""

    def preempt(step):
        step.preempt(step.decoding[0])
        step.idle_until(step.now + 0.001)

    decodes = [grants(a=1)] * 5
    once = [grants(a=None), *decodes, preempt, grants(a=None), grants(a=1)]
    requests = [Spec("a", 0, 8, 8).request(), Spec("a", 10**9, 8, 8).request()]
    requests[1].content = UniqueContent(1)
    made = lab(Script(*once, *once), requests)
    made.engine.run()
    check_streams(Outcome(made.engine, requests))
    assert [request.num_preemptions for request in requests] == [1, 1]
