"""Known ways in which serving engines go wrong, each as the smallest run that shows it."""

from dataclasses import replace

import pytest
from four import ALL, FOUR
from hypothesis import given
from scripted import (
    HOST_BLOCK_GIB,
    MS,
    PART,
    Script,
    ScriptedExecutor,
    Told,
    check_all_tokens,
    checked,
    grants,
    heard,
    ids,
    lab,
    named,
    populated,
    serve,
)

from schedlab.framework.content import SessionContent
from schedlab.framework.policy import Arrived, Finished, Policy, Preempted, Progressed
from schedlab.framework.request import EngineRequest, SamplingParams
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.harness import Spec, check_streams, run
from schedlab.framework.testing.strategies import limits, specs

# -- rejection at submission ------------------------------------------------------------------------------------------

POOL, MODEL = 40, 50  # tokens: 10 blocks of 4


@pytest.mark.parametrize(
    "prompt, output, live, rejected",
    [
        (31, 10, False, None),  # all but the newest token are cached: 40
        (31, 11, False, "KV cache"),
        (40, 1, False, None),
        (41, 1, False, "KV cache"),
        (39, 1000, True, None),
        (40, 1, True, "KV cache"),
        (41, 1000, True, "KV cache"),
    ],
)
def test_what_can_never_fit_the_pool_is_rejected(prompt, output, live, rejected):
    assert_rejected(prompt, output, live, rejected, num_blocks=10, max_model_len=1000)


@pytest.mark.parametrize(
    "prompt, output, live, rejected",
    [
        (40, 10, False, None),
        (40, 11, False, "max_model_len"),
        (49, 1, False, None),
        (49, 1000, True, None),
        (50, 1, True, "max_model_len"),
    ],
)
def test_what_can_never_fit_the_model_is_rejected(prompt, output, live, rejected):
    assert_rejected(prompt, output, live, rejected, num_blocks=100, max_model_len=MODEL)


def assert_rejected(prompt, output, live, rejected, **keys):
    """The request in question comes between two others, which must finish whatever becomes of it."""
    trace = [Spec("before", 0, 8, 3), Spec("it", 0, prompt, output, live=live), Spec("after", 0, 8, 3)]
    source = Told([spec.request() for spec in trace])
    made = lab(Script(), source.requests, source=source, max_num_batched_tokens=64, **keys)
    tables = made.finish()
    assert made["before"].state == made["after"].state == "finished"
    assert source.told == {"before": 1, "it": 1, "after": 1}
    heard = [event.request.request_id for event in made.policy.events if isinstance(event, (Arrived, Finished))]
    if rejected is None:
        assert made["it"].state in ("finished", "length_capped") and "it" in heard
        return
    assert made["it"].state == "rejected" and rejected in made["it"].reason
    assert "it" not in heard, "a policy never sees what was rejected"
    assert tables.summary["requests/rejected"] == 1 and tables.summary["requests/offered"] == 3
    assert tables.summary["ttft/max"] is not None and made["it"].first_scheduled_ns is None


@pytest.mark.parametrize("name", ALL)
def test_what_can_never_fit_does_not_stop_a_policy(name):
    trace = [Spec("a", 0, 20, 4), Spec("huge", 0, 97, 1), Spec("b", 0, 20, 4), Spec("vast", 0, 90, 200)]
    outcome = run(ALL[name](), trace)
    states = {spec.name: outcome.by_name[spec.name].state for spec in trace}
    assert states == {"a": "finished", "huge": "rejected", "b": "finished", "vast": "rejected"}


@pytest.mark.parametrize("prompt, output, live", [(0, 5, False), (5, 0, False), (0, 5, True), (5, 0, True)])
def test_what_has_nothing_to_compute_or_to_emit_is_rejected(prompt, output, live):
    made = lab(Script(), [Spec("a", 0, 4, 2), Spec("empty", 0, prompt, output, live=live)])
    made.finish()
    assert made["empty"].state == "rejected" and "empty" in made["empty"].reason
    assert made["empty"].num_output_tokens == 0


# -- where a request ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_live_request_that_outgrows_the_pool_is_capped_and_the_others_live(name):
    """40 slots hold the prompt and 24 generated tokens; the 25th is emitted and has no place left."""
    trace = [Spec("it", 0, 16, 1000, live=True), Spec("b", 5 * MS, 12, 6), Spec("c", 9 * MS, 12, 6)]
    outcome = run(ALL[name](), trace, num_blocks=10)
    check_streams(outcome)
    it = outcome.by_name["it"]
    assert it.state == "length_capped" and it.num_output_tokens == POOL + 1 - 16
    assert "KV cache of 40 tokens" in it.reason
    assert {outcome.by_name[other].state for other in "bc"} == {"finished"}
    assert outcome.tables.result["summary"]["requests/length_capped"] == 1


def test_a_live_request_ends_at_the_model_s_limit():
    outcome = run(Script(), [Spec("it", 0, 16, 1000, live=True)], max_model_len=MODEL)
    assert outcome.by_name["it"].state == "length_capped"
    assert outcome.by_name["it"].num_tokens == MODEL and "max_model_len 50" in outcome.by_name["it"].reason


def test_max_tokens_defaults_to_what_the_model_has_left():
    live = EngineRequest("a", 0, 16, Spec("a", 0, 16, 1).content())
    replayed = EngineRequest("b", 0, 10, Spec("b", 0, 10, 1).content(), recorded_output_tokens=3)
    made = lab(Script(), [live, replayed], max_model_len=MODEL)
    made.finish()
    assert (live.max_tokens, replayed.max_tokens) == (34, 40), "never the recorded length"
    assert (live.num_output_tokens, replayed.num_output_tokens) == (34, 3)


def test_a_live_request_ends_at_a_stop_token_and_a_replay_does_not():
    free = run(Script(), [Spec("a", 0, 16, 12)]).streams["a"]
    stop = free[5]
    executor = StubExecutor()
    executor.eos_token_ids = (stop,)
    assert free.index(stop) == 5
    for live, length in ((True, 6), (False, 12)):
        outcome = run(Script(), [Spec("a", 0, 16, 12, live=live)], executor=executor)
        assert outcome.by_name["a"].state == "finished"
        assert outcome.streams["a"] == free[:length]


@pytest.mark.parametrize("ignore_eos, stop_ids, length", [(False, (), 6), (True, (), 12), (True, (3,), 4)])
def test_stop_tokens_of_the_request_count_beside_the_model_s(ignore_eos, stop_ids, length):
    free = run(Script(), [Spec("a", 0, 16, 12)]).streams["a"]
    executor = StubExecutor()
    executor.eos_token_ids = (free[5],)
    sampling = SamplingParams(ignore_eos=ignore_eos, stop_token_ids=tuple(free[i] for i in stop_ids))
    request = EngineRequest("a", 0, 16, Spec("a", 0, 16, 1).content(), max_tokens=12, sampling=sampling)
    lab(Script(), [request], executor=executor).finish()
    assert request.output_token_ids == free[:length]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("prompt", [3, 4, 8, 32])
@pytest.mark.parametrize("name", FOUR)
def test_one_token_finishes_on_the_prefill_step_and_frees_everything(name, prompt, live):
    trace = [Spec("d", 0, 6, 20), Spec("it", 4 * MS, prompt, 1, live=live)]
    outcome = run(FOUR[name](), trace)
    check_streams(outcome)
    it = outcome.by_name["it"]
    assert it.state == "finished" and it.num_output_tokens == 1
    assert it.finished_ns == it._first_token_ns
    chunks = [tokens for row in outcome.tables.decisions["grants"] for who, tokens in row if who == "it"]
    assert sum(chunks) == prompt, "one prefill and no decode"
    decoded = [row for row in outcome.tables.decisions["decodes"] if row != "all" and "it" in row]
    assert not decoded


@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("name", ["fcfs", "chunked_prefill"])
def test_a_prompt_of_exactly_some_blocks(name, blocks, block_size):
    prompt = blocks * block_size
    trace = [Spec(n, at * MS, prompt, 5, ids=(1, 2, 3), id_width=16) for n, at in (("a", 0), ("b", 20))]
    outcome = run(FOUR[name](), trace, block_size=block_size, num_blocks=100, max_num_batched_tokens=64)
    check_streams(outcome)
    assert outcome.streams["a"] == outcome.streams["b"]
    assert outcome.by_name["b"].cached_tokens == (prompt - 1) // block_size * block_size, "the last token is computed"


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
        self._running, self._tokens, self._last = [], 0, {}

    def schedule(self, step):
        self._running = list(step.running)
        self._policy.schedule(step)

    def observe(self, event):
        self._policy.observe(event)
        if isinstance(event, Progressed):
            self._tokens += sum(tokens for _, tokens in event.prefills) + len(event.decodes) * event.steps
        if isinstance(event, Preempted):
            assert event.request is not self._running[0], "the oldest was preempted"
            key = event.request.request_id
            assert self._last.get(key) != self._tokens, "preempted twice, and nothing was computed in between"
            self._last[key] = self._tokens


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


# -- prefix cache -----------------------------------------------------------------------------------------------------

SAME = {"ids": (1, 2, 3), "id_width": 4}


def test_blocks_are_visible_when_the_step_has_committed_and_not_before():
    seen = []

    def look(step):
        b = named(step)["b"]
        seen.append((step.cached_tokens(b), step.pending_tokens(b)))

    def first(step):
        look(step)
        step.grant(named(step)["a"], 6)
        look(step)

    def second(step):
        look(step)
        step.grant(named(step)["a"])
        look(step)

    made = lab(Script(first, second, lambda step: (look(step), serve(step))), [Spec(n, 0, 12, 2, **SAME) for n in "ab"])
    made.finish()
    assert seen == [(0, 0), (0, 8), (4, 4), (4, 4), (8, 0)], "b may reuse 8 of its 12 tokens"


def test_the_same_prompt_twice_in_a_step_is_computed_twice_and_kept_once():
    executor = ScriptedExecutor(1)
    trace = [Spec(n, 0, 13, 3, ids=(1, 2, 3, 4), id_width=4) for n in "ab"]
    made = lab(Script(grants(a=None, b=None)), trace, executor=executor)
    made.step()
    assert executor.batches[0][0] == [("a", 0, 13), ("b", 0, 13)]
    ledger = made.engine.ledger
    tables = [made[n].block_table for n in "ab"]
    assert tables[0][:3] == tables[1][:3] and tables[0][3] != tables[1][3]
    assert ledger.cache.num_free == 24 - 5
    made.finish()


def test_a_duplicate_of_a_running_prefix_is_deferred_by_prefix_reuse():
    executor = ScriptedExecutor(1)
    made = lab(FOUR["prefix_reuse"](), [Spec(n, 0, 12, 3, **SAME) for n in "ab"], executor=executor)
    made.finish()
    granted = [prefill for prefills, _ in executor.batches for prefill in prefills]
    assert granted == [("a", 0, 12), ("b", 8, 4)]


@pytest.mark.parametrize("block_size", [1, 2, 4, 12])
def test_a_fully_cached_prompt_still_computes_its_last_token(block_size):
    executor = ScriptedExecutor(1)
    trace = [Spec(n, t * MS, 12, 2, **SAME) for n, t in (("a", 0), ("b", 10))]
    made = lab(Script(), trace, executor=executor, block_size=block_size, num_blocks=96 // block_size)
    made.finish()
    granted = {name: (start, tokens) for prefills, _ in executor.batches for name, start, tokens in prefills}
    start = 11 // block_size * block_size
    assert granted["b"] == (start, 12 - start)


# -- failures ---------------------------------------------------------------------------------------------------------


class Failing(StubExecutor):
    """Reports that the named request failed in its n-th grant."""

    def __init__(self, name, grant):
        super().__init__()
        self._name, self._left = name, grant

    def execute(self, batch):
        result = super().execute(batch)
        requests = ids(batch.requests())
        if self._name in requests:
            self._left -= 1
            if not self._left:
                result.failed[requests.index(self._name)] = "out of luck"
        return result


def whoever_is_left(*names):
    """A move that grants each of `names` that still runs four tokens or what it has left."""

    def move(step):
        running = named(step)
        for name in names:
            assert name not in running or step.grant(running[name], 4)

    return move


FAILS = {"first chunk": 1, "second chunk": 2, "last chunk": 3, "first decode": 4, "third decode": 6}


@pytest.mark.parametrize("case", FAILS)
@pytest.mark.parametrize("name", ["first", "it", "last"])
def test_a_failed_request_disturbs_nobody(case, name):
    """Three equal prompts of three chunks in each step, decoded one by one and in bulk; `name` fails."""
    ids_ = {"first": (1, 2, 9), "it": (1, 2, 8), "last": (1, 2, 7)}
    trace = [Spec(n, 0, 12, 6, ids=i, id_width=4) for n, i in ids_.items()] + [Spec("d", 0, 4, 12)]
    chunk = whoever_is_left("d", "first", "it", "last")
    moves = [grants(d=4, first=4, it=4, last=4), chunk, chunk, lambda step: step.grant_decodes()]
    moves += [whoever_is_left("d", "last", "it", "first"), whoever_is_left("it", "first", "d", "last")]
    source = Told([spec.request() for spec in trace])
    made = lab(Script(*moves), source.requests, source=source, executor=Failing(name, FAILS[case]))
    tables = made.finish()
    check_all_tokens(made)
    assert made[name].state == "failed" and made[name].reason == "out of luck"
    assert {made[other].state for other in ("first", "it", "last", "d") if other != name} == {"finished"}
    assert tables.summary["requests/failed"] == 1 and tables.summary["requests/finished"] == 3
    assert source.told == dict.fromkeys(("first", "it", "last", "d"), 1)


@pytest.mark.parametrize("grant", [1, 2, 3, 4, 6])
def test_a_failure_without_tokens_is_the_same(grant):
    """An executor that makes no tokens ends requests by their lengths alone, at the same steps."""

    class Silent(Failing):
        def execute(self, batch):
            return replace(super().execute(batch), tokens=None)

    ends = []
    for executor in (Failing("b", grant), Silent("b", grant)):
        made = lab(FOUR["chunked_prefill"](), [Spec(n, 0, 9, 5) for n in "abc"], executor=executor)
        made.finish()
        stamps = [(r.state, r.finished_ns, r.num_output_tokens, r.num_computed_tokens) for r in made.requests.values()]
        ends.append(stamps)
    assert ends[0] == ends[1] and ends[0][1][0] == "failed"


def test_what_failed_is_never_published():
    """b has the same prompt: it finds the first chunk of a, which went well, and nothing of the second."""
    seen = []

    def look(step):
        seen.append(step.cached_tokens(named(step)["b"]))
        serve(step)

    trace = [Spec(n, 0, 17, 2, ids=(1, 2, 3, 4, 5), id_width=4) for n in "ab"]
    made = lab(Script(grants(a=5), grants(a=None), look), trace, executor=Failing("a", 2))
    made.finish()
    assert seen == [4] and made["a"].state == "failed"
    check_all_tokens(made)


def test_the_output_of_a_failed_turn_is_never_published():
    for fails, hit in ((99, 16), (5, 12)):
        turn = EngineRequest("turn", 0, 12, SessionContent("s"), recorded_output_tokens=7, session="s")
        following = EngineRequest("following", 30 * MS, 30, SessionContent("s"), recorded_output_tokens=2, session="s")
        made = lab(Script(), [turn, following], executor=Failing("turn", fails))
        made.finish()
        assert following.cached_tokens == hit


def test_a_failure_is_told_like_any_other_end():
    """Progressed first, then Finished in batch order."""
    trace = [Spec(n, 0, 4, 1) for n in ("a", "it", "c")]
    made = lab(Script(), trace, executor=Failing("it", 1))
    made.finish()
    assert [type(e).__name__ for e in made.policy.events][-4:] == ["Progressed", "Finished", "Finished", "Finished"]
    assert heard(made, Finished) == [("Finished", "a"), ("Finished", "it"), ("Finished", "c")]


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_latencies_of_a_preempted_request():
    """1 ms a step. First token at 1 ms; two more; out for 10 ms; two more: TTFT stays, the gap is an ITL."""

    def preempt(step):
        step.preempt(step.decoding[0])
        step.idle_until(step.now + 0.010)

    moves = [grants(a=None), grants(a=1), grants(a=1), preempt]
    made = lab(Script(*moves), [Spec("a", 0, 9, 5)], executor=ScriptedExecutor(1))
    summary = made.finish().summary
    assert summary["ttft/max"] == summary["queue/max"] + 0.001 == 0.001
    assert summary["e2e/max"] == 0.015
    assert summary["itl/max"] == 0.011 and summary["itl/p50"] == 0.001
    assert summary["itl/mean"] == pytest.approx((0.001 * 3 + 0.011) / 4)
    assert summary["tpot/mean"] == pytest.approx((0.015 - 0.001) / 4)


def test_reuse_counts_at_the_first_admission_and_what_a_resume_finds_apart():
    """b reuses 8 of its 12 prompt tokens once; its resume finds 12 of the 13 computed and computes one again."""

    def preempt(step):
        step.preempt(named(step)["b"])
        step.idle_until(step.now + 0.001)

    moves = [grants(a=None), grants(b=None), grants(b=1), preempt]
    trace = [Spec("a", 0, 12, 1, **SAME), Spec("b", 0, 12, 4, **SAME)]
    summary = lab(Script(*moves), trace).finish().summary
    assert summary["prefix/tokens_reused"] == 8
    assert summary["prefix/hit_rate"] == 8 / 24
    assert summary["prefix/tokens_resumed"] == 12
    assert summary["recomputed_tokens"] == 1
    assert (summary["preemptions/recompute"], summary["preemptions/swap"]) == (1, 0)


def test_a_trace_without_identity_has_no_hit_rate():
    summary = lab(Script(), [Spec("a", 0, 12, 3), Spec("b", 0, 12, 3)]).finish().summary
    assert summary["prefix/hit_rate"] is None


def test_open_loop_arrivals_wait_for_no_slot():
    """One slot, taken for 40 ms: the others arrive when the trace says, and their TTFT has the whole wait in it."""
    trace = [Spec("first", 0, 4, 40), *[Spec(f"r{i}", i * MS, 4, 1) for i in range(1, 20)]]
    arrivals = {}

    def look(step):
        for event in made.policy.events:
            arrivals.setdefault(event.request.request_id, step.now) if isinstance(event, Arrived) else None
        serve(step)

    made = lab(Script(then=look), trace, max_num_seqs=1, executor=ScriptedExecutor(1))
    tables = made.finish()
    assert arrivals == {spec.name: pytest.approx(spec.arrival_ns / 1e9) for spec in trace}
    ttft = tables.requests["first_token_s"] - tables.requests["arrival_s"]
    assert sorted(tables.requests["first_token_s"][1:]) == pytest.approx([0.041 + 0.001 * i for i in range(19)])
    assert tables.summary["ttft/max"] == pytest.approx(max(ttft)) and max(ttft) >= 0.039


def test_one_token_has_no_tpot():
    summary = lab(Script(), [Spec("a", 0, 12, 1)]).finish().summary
    assert summary["tpot/mean"] is None and summary["itl/mean"] is None and summary["ttft/mean"] is not None


# -- refused names ----------------------------------------------------------------------------------------------------


def test_two_requests_of_one_name_are_refused_by_name():
    with pytest.raises(ValueError, match="request a: a request of this name"):
        lab(Script(), [Spec("a", 0, 4, 3), Spec("a", 0, 4, 3)]).finish()


def test_every_terminal_state_reaches_the_source_once():
    trace = [
        Spec("finished", 0, 8, 3),
        Spec("rejected", 0, 900, 3),
        Spec("aborted", 0, 8, 30, abort_ns=3 * MS),
        Spec("capped", 0, 8, 900, live=True),
        Spec("failed", 0, 8, 9),
    ]
    source = Told([spec.request() for spec in trace])
    made = lab(Script(), source.requests, source=source, executor=Failing("failed", 3), max_model_len=40)
    made.finish()
    assert source.told == dict.fromkeys([spec.name for spec in trace], 1)
    states = [made[spec.name].state for spec in trace]
    assert states == ["finished", "rejected", "aborted", "length_capped", "failed"]
