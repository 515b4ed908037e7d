"""What each policy's docstring promises, step by step on traces made by hand, and as a rule on random ones."""

from typing import NamedTuple

import pytest
from four import FOUR
from hypothesis import given
from hypothesis import strategies as st
from scripted import MS, PART, Script, lab, log, order_of, serve

from schedlab.framework.policy import Policy, Progressed
from schedlab.framework.request import EngineRequest
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.harness import Spec, run
from schedlab.framework.testing.strategies import limits, specs
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse

small = specs(max_requests=10, max_prompt=60, max_output=12)


# -- fcfs -------------------------------------------------------------------------------------------------------------


def test_fcfs_computes_whole_prompts_in_order_or_decodes():
    """Budget 16. c does not fit beside a and b, d not beside c; 'long' runs alone in 16 + 16 + 8; decodes come last."""
    lengths = {"a": 8, "b": 6, "c": 6, "d": 11, "long": 40, "last": 4}
    trace = [Spec(name, 0, prompt, 3) for name, prompt in lengths.items()]
    assert log(FCFS(), trace) == [
        ([("a", 0, 8), ("b", 0, 6)], []),
        ([("c", 0, 6)], []),
        ([("d", 0, 11)], []),
        ([("long", 0, 16)], []),
        ([("long", 16, 16)], []),
        ([("long", 32, 8)], []),
        ([("last", 0, 4)], []),
        ([], list(lengths)),
        ([], list(lengths)),
    ]


def test_fcfs_stalls_decodes_for_as_long_as_prompts_arrive():
    """One prompt of 16 tokens arrives in each of 20 steps: nobody gets a second token while a slot is free."""
    trace = [Spec(f"r{i}", i * MS, 16, 2) for i in range(20)]
    steps = log(FCFS(), trace, max_num_seqs=16, max_num_batched_tokens=16)[:16]
    assert all(len(prefills) == 1 and not decodes for prefills, decodes in steps)


@given(small, limits())
def test_fcfs_never_mixes_and_never_splits_what_fits_the_budget(trace, keys):
    executor = Watched()
    run(FCFS(), trace, executor=executor, **keys)
    budget, chunked = keys["max_num_batched_tokens"], None
    for prefills, decodes in executor.steps:
        assert not (prefills and decodes)
        if chunked is not None and chunked.state != "aborted":
            assert [p.request for p in prefills] == [chunked], "a long prompt's chunks are consecutive and alone"
        unfinished = [p for p in prefills if p.left]
        if unfinished:
            (only,) = prefills
            assert only.tokens + only.left > budget or only.request is chunked, "split although it fits the budget"
        chunked = next((p.request for p in unfinished if not p.decodes_next), None)


class Chunk(NamedTuple):
    """A prefill of `tokens` that leaves `left`; a resumed request with only its newest token left decodes next."""

    request: EngineRequest
    tokens: int
    left: int
    decodes_next: bool


class Watched(StubExecutor):
    """The stub, keeping the prefills and decodes of each step."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def execute(self, batch):
        prefills = []
        for request, start, tokens in batch.prefills:
            left = request.num_tokens - start - tokens
            prefills.append(Chunk(request, tokens, left, left == 1 and request.num_output_tokens > 0))
        if prefills or batch.decodes:
            self.steps.append((prefills, list(batch.decodes)))
        return super().execute(batch)


# -- chunked_prefill --------------------------------------------------------------------------------------------------


def test_chunked_prefill_decodes_first_and_fills_the_chunk():
    """Chunks of 8 tokens, decodes included."""
    trace = [Spec("a", 0, 6, 5), Spec("b", 0, 20, 2), Spec("c", 2 * MS, 5, 2)]
    assert log(ChunkedPrefill(chunk_size=8), trace) == [
        ([("a", 0, 6), ("b", 0, 2)], []),
        ([("b", 2, 7)], ["a"]),
        ([("b", 9, 7)], ["a"]),
        ([("b", 16, 4), ("c", 0, 3)], ["a"]),
        ([("c", 3, 2)], ["a", "b"]),
        ([], ["c"]),
    ]


@given(small, limits())
def test_chunked_prefill_never_exceeds_its_chunk(trace, keys):
    executor = Watched()
    run(ChunkedPrefill(chunk_size=12), trace, executor=executor, **keys)
    for prefills, decodes in executor.steps:
        assert sum(p.tokens for p in prefills) + len(decodes) <= min(12, keys["max_num_batched_tokens"])


def test_chunked_prefill_has_no_generation_stall_and_fcfs_has():
    """a decodes while eight prompts of 64 tokens come in: between two of its tokens fcfs computes whole prompts."""
    trace = [Spec("a", 0, 4, 30), *[Spec(f"p{i}", (2 + i) * MS, 64, 1) for i in range(6)]]

    def worst_gap(policy):
        """Steps of 1 ms and 10 us a token."""
        made = lab(policy, trace, num_blocks=200, max_num_batched_tokens=64, executor=StubExecutor(token_ns=100_000))
        return made.finish().summary["itl/max"]

    fcfs, chunked = worst_gap(FCFS()), worst_gap(ChunkedPrefill(chunk_size=16))
    assert fcfs > 6 * (0.001 + 64 * 0.0001), "all six prompts between two tokens"
    assert chunked <= 0.001 + 16 * 0.0001 + 1e-9
    assert fcfs > 10 * chunked


# -- decode_priority --------------------------------------------------------------------------------------------------


def test_decode_priority_adds_at_most_the_stall_tokens_while_somebody_decodes():
    """Nobody decodes in the first step, so prompts fill its budget; then at most 5 tokens join each decode of a."""
    policy = DecodePriority(stall_tokens=5, max_prefill_streak=100, watermark_blocks=0)
    assert log(policy, [Spec("a", 0, 10, 5), Spec("b", 0, 22, 1)]) == [
        ([("a", 0, 10), ("b", 0, 6)], []),
        ([("b", 6, 5)], ["a"]),
        ([("b", 11, 5)], ["a"]),
        ([("b", 16, 5)], ["a"]),
        ([("b", 21, 1)], ["a"]),
    ]


def test_decode_priority_rests_after_its_prefill_streak():
    policy = DecodePriority(stall_tokens=2, max_prefill_streak=2, watermark_blocks=0)
    steps = log(policy, [Spec("a", 0, 16, 9), Spec("b", 0, 10, 1)])
    assert [sum(tokens for _, _, tokens in prefills) for prefills, _ in steps[1:]] == [2, 0, 2, 2, 0, 2, 2, 0]
    assert all(decodes == ["a"] for _, decodes in steps[1:])


def test_decode_priority_counts_a_streak_from_its_first_step():
    """Steps without prompts come before: b may use both steps of the streak at once."""
    policy = DecodePriority(stall_tokens=2, max_prefill_streak=2, watermark_blocks=0)
    steps = log(policy, [Spec("a", 0, 8, 20), Spec("b", 6 * MS, 8, 1)])
    tokens = [sum(tokens for _, _, tokens in prefills) for prefills, _ in steps[1:]]
    assert tokens[tokens.index(2) :][:6] == [2, 2, 0, 2, 2, 0]


@pytest.mark.parametrize("watermark, admitted", [(0, 1), (3, 1), (4, 5)])
def test_decode_priority_admits_only_what_leaves_the_watermark_free(watermark, admitted):
    """8 blocks of 4: a has 3 (8 tokens and a decode), b needs 2; 3 are left, until a's finish frees more."""
    policy = DecodePriority(stall_tokens=16, max_prefill_streak=100, watermark_blocks=watermark)
    steps = log(policy, [Spec("a", 0, 8, 5), Spec("b", MS, 8, 1)], num_blocks=8)
    assert [i for i, (prefills, _) in enumerate(steps) if prefills] == [0, admitted]


@given(small, limits())
def test_decode_priority_keeps_its_bounds(trace, keys):
    executor = Watched()
    run(DecodePriority(stall_tokens=5, max_prefill_streak=2, watermark_blocks=2), trace, executor=executor, **keys)
    streak = 0
    for prefills, decodes in executor.steps:
        tokens = sum(p.tokens for p in prefills)
        streak = streak + 1 if tokens and decodes else 0
        assert not decodes or tokens <= 5
        assert streak <= 2


# -- prefix_reuse -----------------------------------------------------------------------------------------------------


SEEDED = Spec("seed", 0, 32, 1, ids=tuple(range(8)), id_width=4)


def prompt(name, arrival_ns, hit_ids, tokens=40):
    """A prompt whose first `hit_ids` ids of 4 tokens are those of the seed."""
    own = 1000 * int.from_bytes(name.encode(), "little")
    ids = tuple(i if i < hit_ids else own + i for i in range(tokens // 4))
    return Spec(name, arrival_ns, tokens, 2, ids=ids, id_width=4)


def test_prefix_reuse_takes_the_longest_cached_prefix_first():
    at = 10 * MS
    trace = [SEEDED, *[prompt(name, at, hit) for name, hit in (("x", 0), ("y", 2), ("z", 4), ("v", 0), ("w", 8))]]
    assert order_of(PrefixReuse(chunk_size=64), trace) == ["seed", "w", "z", "y", "x", "v"], "equals in arrival order"


def test_prefix_reuse_ranks_anew_what_a_running_request_publishes():
    """q shares p's prompt and overtakes r, which came before it, as soon as p has published."""
    trace = [prompt("p", 0, 0), prompt("r", 0, 0)]
    trace.append(Spec("q", 0, 40, 2, ids=trace[0].ids, id_width=4))
    assert order_of(PrefixReuse(), trace) == ["p", "q", "r"]


@pytest.mark.parametrize("taken, order", [(64, ["hit", "cold"]), (96, ["cold", "hit"])])
def test_prefix_reuse_ranks_down_what_is_evicted(taken, order):
    """'hit' leads by its cached tokens, until 'big' takes the whole pool of 96 tokens; then 'cold', the earlier one."""
    trace = [SEEDED, Spec("big", MS // 2, taken, 1), prompt("cold", 2 * MS, 0), prompt("hit", 2 * MS, 8)]
    policy = PrefixReuse(chunk_size=128, aging_tokens_per_s=1e-6)
    assert order_of(policy, trace, num_blocks=24, max_num_batched_tokens=128) == ["seed", "big", *order]


def test_prefix_reuse_defers_duplicates_and_passes_over_them():
    shared = tuple(range(10))
    trace = [Spec(n, 0, 40, 2, ids=shared, id_width=4) for n in "abc"] + [Spec("d", 0, 8, 2)]
    steps = log(PrefixReuse(chunk_size=64), trace, max_num_batched_tokens=64)
    assert steps[0] == ([("a", 0, 40), ("d", 0, 8)], [])
    assert steps[1] == ([("b", 36, 4), ("c", 36, 4)], ["a", "d"])


def test_prefix_reuse_defers_no_longer_than_the_prefix_is_pending():
    """a computes the shared prefix in chunks of 8 of its 40 tokens; b waits for that and no longer."""
    trace = [Spec(n, 0, 40, 1, ids=tuple(range(10)), id_width=4) for n in "ab"]
    steps = log(PrefixReuse(chunk_size=8), trace)
    assert [prefills for prefills, _ in steps] == [[("a", 8 * i, 8)] for i in range(5)] + [[("b", 36, 4)]]


@pytest.mark.parametrize("aging, bound_ms", [(2000.0, 16), (8000.0, 4), (500.0, 64)])
def test_prefix_reuse_serves_a_cold_request_within_its_bound(aging, bound_ms):
    """Hot requests with 32 cached tokens arrive every 2 ms and take 3 ms each, for ever; a cold one comes at 20 ms.

    It may be overtaken by those that arrive less than 32 / aging seconds after it, and by no other.
    """
    hot = [prompt(f"h{i:03d}", (2 + 2 * i) * MS, 8) for i in range(80)]
    trace = [SEEDED, *hot, prompt("cold", 20 * MS, 0)]
    order = order_of(PrefixReuse(chunk_size=64, aging_tokens_per_s=aging), trace)
    arrivals = {spec.name: spec.arrival_ns for spec in trace}
    after = order[order.index("cold") + 1 :]
    late = [name for name in order if arrivals[name] > (20 + bound_ms) * MS]
    assert late and set(late) <= set(after)
    overtaking = [n for n in order if arrivals[n] > 20 * MS and n not in after]
    assert overtaking, "age is not all that counts"


def test_a_heap_orders_like_a_sort():
    """The same decisions as sorting the whole queue in every step, on a deep queue over few prefixes."""

    class Sorting(PrefixReuse):
        def _best_first(self, step):
            def key(request):
                return self.aging_tokens_per_s * request.arrival_s - step.cached_tokens(request), order[request]

            order = {request: i for i, request in enumerate(step.waiting)}
            for request in sorted(step.waiting, key=key):
                if not step.pending_tokens(request):
                    yield request

    outcomes = []
    for kind in (PrefixReuse, Sorting):
        trace = [Spec(f"r{i:03d}", i * MS // 7, 24, 1 + i % 9, ids=(i * 7 % 5, i * 3 % 4, i)) for i in range(120)]
        keys = {"num_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 64}
        outcomes.append(lab(kind(chunk_size=32, aging_tokens_per_s=400.0), trace, **keys).finish())
    assert outcomes[0].digest == outcomes[1].digest
    assert outcomes[0].summary["prefix/hit_rate"] > 0


# -- all of them ------------------------------------------------------------------------------------------------------


@st.composite
def any_knobs(draw):
    """One of the four with knobs from the least to more than the engine has."""
    mode = draw(st.sampled_from(["recompute", "swap"]))
    tokens, few = st.sampled_from([1, 2, 7, 1000]), st.sampled_from([1, 2, 1000])
    chunk = draw(tokens)
    return draw(
        st.sampled_from(
            [
                FCFS(preempt_mode=mode),
                ChunkedPrefill(chunk, preempt_mode=mode),
                DecodePriority(chunk, draw(few), draw(st.sampled_from([0, 1, 1000])), preempt_mode=mode),
                PrefixReuse(chunk, draw(st.sampled_from([1e-9, 100.0, 1e9])), preempt_mode=mode),
            ]
        )
    )


@given(trace=small, keys=limits(), policy=any_knobs())
def test_no_knob_stalls_or_livelocks(trace, keys, policy):
    """Every request comes to its end within as many steps as there are tokens, ten times over."""
    made = lab(policy, trace, **keys)
    steps = 10 * sum(spec.prompt + spec.output for spec in trace) + 10 * len(trace)
    for _ in range(steps):
        if not made.engine.step():
            break
    assert made.engine.num_unfinished == 0 and all(r.finished_ns is not None for r in made.requests.values())


class OldestFirst(Policy):
    """Watches that another policy lets the oldest running request progress in every step."""

    def __init__(self, policy):
        self._policy, self._oldest = policy, None

    def schedule(self, step):
        self._oldest = step.running[0] if step.running else None
        self._decoding = bool(step.decoding)
        self._policy.schedule(step)

    def observe(self, event):
        self._policy.observe(event)
        if isinstance(event, Progressed) and self._oldest is not None and self._oldest.state == "running":
            granted = [request for request, _ in event.prefills] + list(event.decodes)
            assert self._oldest in granted, f"{self._oldest} got nothing"


@pytest.mark.parametrize("name", ["chunked_prefill", "decode_priority", "prefix_reuse"])
@PART
@given(trace=small, keys=limits())
def test_the_oldest_running_request_progresses_in_every_step(name, trace, keys):
    run(OldestFirst(FOUR[name]()), trace, **keys)


@pytest.mark.parametrize("name", FOUR)
def test_a_long_prompt_does_not_stop_admission_for_ever(name):
    """Long prompts keep coming, one for each that is done; the short ones in between are served between them."""
    trace = [Spec(f"long{i}", i * 5 * MS, 90, 2) for i in range(8)]
    trace += [Spec(f"s{i}", (5 * i + 1) * MS, 4, 2) for i in range(8)]
    outcome = run(FOUR[name](), trace, num_blocks=30)
    last = outcome.by_name["long7"].finished_ns
    assert all(outcome.by_name[f"s{i}"].finished_ns < last for i in range(7))


@pytest.mark.parametrize("name", FOUR)
def test_a_policy_admits_nothing_in_a_step_that_preempted(name):
    """What was thrown out would be thrown out again by those let in behind it."""
    trace = [Spec(f"r{i}", i * MS, 10 + i, 20) for i in range(10)]
    outcome = run(FOUR[name](), trace, num_blocks=14)
    rows = outcome.tables.decisions
    assert any(len(row) for row in rows["preempted"])
    running = set()
    for preempted, granted in zip(rows["preempted"], rows["grants"], strict=True):
        running -= {who for who, _ in preempted}
        new = {who for who, _ in granted} - running
        assert not (len(preempted) and new), "admitted beside a preemption"
        running |= new


@pytest.mark.parametrize(
    "make",
    [
        lambda: ChunkedPrefill(chunk_size=0),
        lambda: DecodePriority(stall_tokens=0),
        lambda: DecodePriority(max_prefill_streak=0),
        lambda: DecodePriority(watermark_blocks=-1),
        lambda: PrefixReuse(chunk_size=0),
        lambda: PrefixReuse(aging_tokens_per_s=-1),
        lambda: PrefixReuse(aging_tokens_per_s=float("nan")),
        lambda: FCFS(preempt_mode="drop"),
        lambda: ChunkedPrefill(preempt_mode="drop"),
        lambda: DecodePriority(preempt_mode="drop"),
        lambda: PrefixReuse(preempt_mode="drop"),
    ],
)
def test_a_knob_out_of_range_is_refused(make):
    with pytest.raises(ValueError, match="policy"):
        make()


def test_the_written_policy_of_these_tests_serves_everybody():
    outcome = run(Script(then=serve), [Spec(f"r{i}", 0, 30, 20) for i in range(6)])
    assert {request.state for request in outcome.requests} == {"finished"}
