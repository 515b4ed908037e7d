"""Requests that are turned away: by the queue's limits, by a rate, by the policy; and what the books and logs say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import (
    HOST_BLOCK_GIB,
    MS,
    Script,
    ScriptedExecutor,
    Told,
    broken,
    check_all_tokens,
    grants,
    heard,
    ids,
    lab,
    named,
    populated,
    serve,
)

from schedlab.framework.admission import Admission, TokenBucket
from schedlab.framework.cost.estimator import LinearEstimator
from schedlab.framework.errors import ConfigError, PolicyError, PolicyStalled
from schedlab.framework.policy import Aborted, Arrived, Rejected
from schedlab.framework.request import SLO
from schedlab.framework.results.digest import digest_of
from schedlab.framework.testing.chaos import Chaos
from schedlab.framework.testing.conformance import assert_conforms
from schedlab.framework.testing.harness import Spec, check_streams, run
from schedlab.framework.testing.strategies import limits, specs
from schedlab.policies.shedding import Shedding
from schedlab.policies.slo_aware import SLOAware


def reject(*names, reason="busy", then=None):
    def move(step):
        for name in names:
            step.reject(named(step)[name], reason)
        if then is not None:
            then(step)

    return move


def states(made):
    return {name: (request.state, request.reason) for name, request in made.requests.items() if request.reason}


# -- the verb


def test_a_rejected_request_ends_when_the_step_has_run():
    seen = []

    def look(step):
        step.reject(named(step)["w1"], "busy")
        seen.append((named(step)["w1"].state, ids(step.waiting)))
        step.grant_decodes()

    made = populated(look)
    made.step()
    assert seen == [("waiting", ["w1", "w2"])] and states(made) == {"w1": ("rejected", "shed:busy")}
    assert made["w1"].finished_ns == made.engine.now_ns, "when the step has run"
    assert heard(made, Rejected) == [("Rejected", "w1")]
    made.finish()
    assert [made[name].state for name in ("w2", "d1", "p1")] == ["finished"] * 3
    check_all_tokens(made)


def test_a_step_that_only_rejects_takes_no_time_and_the_policy_is_asked_again():
    asked = []

    def note(step):
        asked.append((step.now, ids(step.waiting)))
        serve(step)

    made = populated(reject("w1"), note)
    before = made.engine.now_ns
    made.step(2)
    assert asked == [(before / 1e9, ["w2"])]
    made.finish()


def test_an_engine_whose_last_requests_are_rejected_goes_on():
    trace = [Spec("a", 0, 4, 2), Spec("b", 9 * MS, 4, 2)]
    made = lab(Script(reject("a", then=lambda step: step.idle_until())), trace)
    made.finish()
    assert states(made) == {"a": ("rejected", "shed:busy")} and made["b"].state == "finished"
    made = lab(Script(reject("a"), reject("b")), trace)
    assert made.finish().summary["requests/rejected"] == 2


def test_a_source_is_told_and_what_follows_comes():
    first, follows = Spec("a", 0, 4, 2).request(), Spec("b", 0, 4, 2).request()
    source = Told([first], after={"a": follows})
    made = lab(Script(reject("a")), [first, follows], source=source)
    made.finish()
    assert source.told == {"a": 1, "b": 1} and follows.state == "finished"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_may_be_rejected_later_and_gives_everything_back(mode):
    moves = [lambda step: (step.preempt(named(step)["d1"], mode), step.grant(named(step)["d2"]))]
    made = populated(*moves, reject("d1", then=serve), swap_space_gib=4 * HOST_BLOCK_GIB)
    made.step()
    assert made["d1"].state == ("swapped" if mode == "swap" else "preempted")
    made.step()
    assert states(made) == {"d1": ("rejected", "shed:busy")}
    made.finish()
    assert made["d1"].num_output_tokens == 1, "what it had emitted stays emitted"


@pytest.mark.parametrize(
    "move, rule, name",
    [
        (reject("w1", "w1"), "a request that this step granted, preempted or rejected cannot be rejected in it", "w1"),
        (reject("d1"), "only a waiting request can be rejected: it is running", "d1"),
        (lambda s: (s.grant(named(s)["w1"]), s.reject(named(s)["w1"])), "granted, preempted or rejected cannot", "w1"),
        (lambda s: (s.preempt(named(s)["d1"]), s.reject(named(s)["d1"])), "granted, preempted or rejected", "d1"),
        (lambda s: (s.reject(named(s)["w1"]), s.grant(named(s)["w1"])), "was rejected in this step and cannot", "w1"),
        (lambda s: (s.reject(named(s)["w1"]), s.preempt(named(s)["w1"])), "only a running request can be", "w1"),
        (lambda s: (s.reject(named(s)["w1"]), s.grant_decodes(), s.hold()), "hold is legal only when a step", None),
    ],
)
def test_the_rules_of_the_verb(move, rule, name):
    broken(move, rule, name)


def test_the_verb_is_dead_with_its_step():
    kept = []
    made = populated(lambda step: (kept.append(step), serve(step)))
    made.step()
    with pytest.raises(PolicyError, match=r"used step\.reject after its schedule returned"):
        kept[0].reject(made["w1"])


def test_a_step_that_does_nothing_is_still_a_stall():
    made = populated(lambda step: None)
    with pytest.raises(PolicyStalled):
        made.step()


def test_rejections_are_in_the_digest_and_in_the_rows_only_where_there_are_any():
    quiet, loud, other = populated(), populated(reject("w1", then=serve)), populated(reject("w2", then=serve))
    tables = [made.finish() for made in (quiet, loud, other)]
    assert len({t.digest for t in tables}) == 3
    assert [[pair for row in t.decisions["rejected"] for pair in row] for t in tables] == [
        [], [["w1", "shed:busy"]], [["w2", "shed:busy"]]]  # fmt: skip
    assert all(digest_of(t.decisions) == t.digest for t in tables)
    lines = [made.recorder._kept_decisions for made in (quiet, loud)]
    assert not any("rejected" in line for line in lines[0])
    assert [json.loads(line)["rejected"] for line in lines[1] if "rejected" in line] == [[["w1", "shed:busy"]]]


class Rejecting(Chaos):
    """Rejects at random beside all else, and where it does nothing else."""

    def schedule(self, step):
        self._dropped = []
        if step.waiting and self._random.random() < 0.3:
            request = self._random.choice(list(step.waiting))
            step.reject(request, "chance")
            if self._random.random() < 0.3:
                return
            self._dropped.append(request)
        super().schedule(step)

    def _mine(self, requests):
        return [request for request in super()._mine(requests) if request not in self._dropped]


@given(specs(), limits(), st.integers(0, 99))
def test_whatever_is_rejected_the_books_are_right_and_the_others_get_their_tokens(trace, keys, seed):
    outcome = run(Rejecting(seed), trace, **keys)
    check_streams(outcome)
    assert all(r.state in ("finished", "rejected", "aborted", "length_capped") for r in outcome.requests)
    again = run(Rejecting(seed), trace, **keys)
    assert again.digest == outcome.digest == digest_of(outcome.tables.decisions)


# -- limits of the queue


def arriving(count, gap_ms=0):
    return [Spec(f"r{i}", i * gap_ms * MS, 8, 4) for i in range(count)]


def rejected(made, reason):
    return [name for name, request in made.requests.items() if request.reason == reason]


def test_who_finds_the_queue_full_is_rejected_on_arrival():
    made = lab(Script(), arriving(6), max_num_waiting_reqs=4)
    made.finish()
    assert rejected(made, "queue_full") == ["r4", "r5"] and made["r4"].finished_ns == 0
    assert len([e for e in made.policy.events if isinstance(e, Arrived)]) == 4, "the policy never hears of them"
    assert not heard(made, Rejected, Aborted)
    made = lab(Script(grants(r0=None)), arriving(6, 1), max_num_queued_reqs=2, executor=ScriptedExecutor(5))
    made.finish()
    assert rejected(made, "queue_full"), "running ones count"


def test_a_limit_of_prompt_tokens_counts_what_is_still_to_compute():
    made = lab(Script(grants(r0=6)), [Spec("r0", 0, 8, 2), Spec("r1", 1 * MS, 8, 2), Spec("r2", 1 * MS, 8, 2)],
               executor=ScriptedExecutor(2), max_num_queued_tokens=10)  # fmt: skip
    made.finish()
    assert rejected(made, "queue_full") == ["r2"], "2 of r0 and 8 of r1 are left to compute"
    alone = lab(Script(), [Spec("big", 0, 30, 2)], max_num_queued_tokens=10)
    alone.finish()
    assert alone["big"].state == "finished", "an empty engine takes any prompt"


@pytest.mark.parametrize("key", ["max_num_waiting_reqs", "max_num_queued_reqs", "max_num_queued_tokens"])
def test_limits_below_one_are_refused(key):
    with pytest.raises(ConfigError, match=f"engine.{key}: expected null or a number of at least 1, found 0"):
        lab(Script(), [], **{key: 0})


# -- rates


def test_a_token_bucket_fills_and_refuses():
    bucket = TokenBucket(rate=2.0, burst=3.0)
    request = Spec("a", 0, 5, 1).request()
    refused = [bucket.refuse(request, None, now) for now in (0, 0, 0, 0, 0.25, 0.5, 0.5, 9, 9, 9, 9)]
    assert [reason is None for reason in refused] == [
        True, True, True, False, False, True, False, True, True, True, False]  # fmt: skip
    assert set(refused) == {None, "rate_limited"}
    by_tokens = TokenBucket(rate=10, burst=8, unit="tokens", per="client")
    assert by_tokens.refuse(request, None, 0) is None and by_tokens.refuse(request, None, 0) == "rate_limited"
    assert by_tokens.refuse(Spec("b", 0, 5, 1, client="other").request(), None, 0) is None
    for keys in ({"rate": 0}, {"burst": float("inf")}, {"unit": "x"}, {"per": "x"}):
        with pytest.raises(ConfigError, match=r"admission\."):
            TokenBucket(**{"rate": 1, "burst": 1, **keys})


def test_an_admission_sees_the_load_and_says_why():
    loads = []

    class Two(Admission):
        def refuse(self, request, load, now):
            loads.append((tuple(load), now))
            return "house full" if load.waiting + load.running >= 2 else None

    made = lab(Script(), arriving(3))
    made.engine.admission = Two()
    made.finish()
    assert loads == [((0, 0, 0), 0.0), ((1, 0, 8), 0.0), ((2, 0, 16), 0.0)]
    assert states(made) == {"r2": ("rejected", "house full")}


# -- policies that shed

ESTIMATOR = LinearEstimator(step=0.001, token=0.001)
SOON = SLO("soon", ttft_s=0.02)


def test_shedding_turns_away_who_cannot_be_in_time_any_more():
    trace = [Spec(f"r{i}", 0, 8, 2, slo=SOON) for i in range(8)] + [Spec("patient", 0, 8, 2)]
    outcome = run(Shedding(ESTIMATOR, chunk_size=9), trace, executor=ScriptedExecutor(6))
    gone = {r.request_id: (r.reason, r.finished_ns) for r in outcome.requests if r.state == "rejected"}
    assert gone and {reason for reason, _ in gone.values()} == {"shed:late"}
    served = [r for r in outcome.requests if r.state == "finished"]
    assert "patient" in {r.request_id for r in served}
    for request in outcome.requests:
        if request.state == "finished" and request.slo is not None:
            assert request.first_scheduled_ns / 1e9 + 0.009 <= SOON.ttft_s, "was in time when it began"


def test_shedding_holds_no_longer_than_to_the_next_that_is_late():
    trace = [Spec("long", 0, 4, 60), Spec("r", 0, 8, 2, slo=SLO("s", ttft_s=0.03))]
    keys = {"max_num_seqs": 1, "executor": ScriptedExecutor(1)}
    for holds in (True, False):
        outcome = run(Shedding(ESTIMATOR, chunk_size=9), trace, honour_holds=holds, **keys)
        (gone,) = [r for r in outcome.requests if r.state == "rejected"]
        assert 21 * MS < gone.finished_ns <= 23 * MS + 1, "its prompt takes 9 of the 30 ms"
        keys["executor"] = ScriptedExecutor(1)


def test_who_can_begin_at_the_last_moment_is_in_time():
    class Instant:
        def step_s(self, *work):
            return 0.0

    trace = [Spec("long", 0, 4, 60), Spec("r", 0, 8, 2, slo=SLO("s", ttft_s=0.021))]
    outcome = run(Shedding(Instant(), chunk_size=9), trace, max_num_seqs=1, executor=ScriptedExecutor(1))
    (gone,) = [r for r in outcome.requests if r.state == "rejected"]
    assert gone.finished_ns == 23 * MS, "not by the step that begins after 21 ms, but by the next"


def test_slo_aware_rejects_after_a_wait_of_its_own():
    trace = [Spec("long", 0, 4, 60), Spec("r", 0, 8, 2), Spec("s", 5 * MS, 8, 2)]
    outcome = run(SLOAware(ESTIMATOR, reject_after_s=0.02), trace, max_num_seqs=1, executor=ScriptedExecutor(1))
    ends = {r.request_id: (r.reason, r.finished_ns // MS) for r in outcome.requests if r.state == "rejected"}
    assert ends["r"][0] == ends["s"][0] == "shed:waited too long"
    assert ends["r"][1] == 21, "in the step that begins when it has waited so long"
    assert 25 <= ends["s"][1] <= 27
    with pytest.raises(ValueError, match=r"policy\.reject_after_s: expected null or above 0"):
        SLOAware(ESTIMATOR, reject_after_s=0)


@pytest.mark.parametrize(
    "make", [lambda: Shedding(ESTIMATOR, chunk_size=12), lambda: SLOAware(ESTIMATOR, reject_after_s=0.004)]
)
def test_the_kit_drives_policies_that_reject(make):
    assert_conforms(make, seconds=2.0)
