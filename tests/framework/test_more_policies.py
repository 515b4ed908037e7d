"""What each further policy claims: a trace on which it differs from fcfs in the direction it names, and its bounds."""

import itertools

import pytest
from four import ESTIMATOR
from hypothesis import given
from hypothesis import strategies as st
from scripted import MS, PART, JumpingExecutor, ScriptedExecutor, lab, log, order_of

from schedlab.framework.cost.estimator import LinearEstimator
from schedlab.framework.policy import Policy, Preempted
from schedlab.framework.predictors import OraclePredictor
from schedlab.framework.request import SLO, EngineRequest
from schedlab.framework.testing.harness import Spec, run
from schedlab.framework.testing.strategies import specs
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.edf import EDF
from schedlab.policies.fair import Fair
from schedlab.policies.fcfs import FCFS
from schedlab.policies.hrrn import HRRN
from schedlab.policies.multilevel_feedback import MultilevelFeedback
from schedlab.policies.priority import Priority
from schedlab.policies.sjf import SJF
from schedlab.policies.slo_aware import SLOAware

small = specs(max_requests=10, max_prompt=60, max_output=12)
AMPLE = {"num_blocks": 400, "max_num_batched_tokens": 64}


def request(name, arrival_ns, prompt, output, **more):
    content = Spec(name, 0, prompt, output).content()
    return EngineRequest(name, arrival_ns, prompt, content, recorded_output_tokens=output, **more)


def served(policy, trace, **keys):
    """Rows by name and the summary of a run on the stub: 1 ms a step and 10 us a token."""
    made = lab(policy, trace, **{**AMPLE, **keys})
    tables = made.finish()
    return made.requests, tables.summary


def mean_e2e(requests):
    return sum(r.finished_ns - r._arrival_ns for r in requests.values()) / len(requests) / MS


# -- priority ---------------------------------------------------------------------------------------------------------


def test_priority_overtakes_in_the_queue_and_fcfs_does_not():
    trace = [Spec("first", 0, 8, 4), *[Spec(n, MS, 8, 4, priority=p) for n, p in (("a", 0), ("b", 2), ("c", 1))]]
    trace.append(Spec("d", 2 * MS, 8, 4, priority=2))
    assert order_of(FCFS(), trace) == ["first", "a", "b", "c", "d"]
    assert order_of(Priority(preempt_running=False), trace) == ["first", "b", "d", "c", "a"]


@pytest.mark.parametrize("second", [10, 30])
def test_who_made_way_in_a_step_is_not_admitted_in_it_though_it_would_fit(second):
    trace = [Spec("a", 0, 120, 50), Spec("b", 5 * MS // 2, second, 50), Spec("c", 7 * MS // 2, 70, 50, priority=1)]
    requests, _ = served(Priority(), trace, num_blocks=12, block_size=16, max_num_batched_tokens=2048)
    assert requests["b"].num_preemptions > 0
    assert all(r.state == "finished" for r in requests.values())


def test_priority_takes_the_slot_of_a_lower_one_and_the_victim_comes_back():
    trace = [Spec("low", 0, 8, 40), Spec("high", 5 * MS, 8, 4, priority=1)]
    requests, summary = served(Priority(), trace, max_num_seqs=1)
    patient, _ = served(Priority(preempt_running=False), trace, max_num_seqs=1)
    assert requests["high"]._first_token_ns < 8 * MS < patient["high"]._first_token_ns
    assert requests["low"].num_preemptions == 1 and requests["low"].num_output_tokens == 40
    assert summary["preemptions/recompute"] == 1


def test_priority_takes_the_blocks_of_the_lowest_and_newest():
    """20 blocks of 4: three requests hold 6 each; the urgent one needs 6, so one victim suffices."""
    trace = [Spec(n, 0, 20, 4 + 4 * i, priority=p) for i, (n, p) in enumerate([("a", 1), ("b", 0), ("c", 0)])]
    trace.append(Spec("urgent", 2 * MS, 20, 2, priority=2))
    requests, _ = served(Priority(), trace, num_blocks=20)
    assert {name: r.num_preemptions for name, r in requests.items()} == {"a": 0, "b": 0, "c": 1, "urgent": 0}


class Displacing(Policy):
    """Watches whom another policy throws out while blocks are plenty, so that only slots can be the reason."""

    def __init__(self, policy):
        self._policy, self.pairs, self._waiting = policy, [], ()

    def schedule(self, step):
        self._waiting = tuple(step.waiting)
        self._policy.schedule(step)

    def observe(self, event):
        self._policy.observe(event)
        if isinstance(event, Preempted):
            self.pairs.append((event.request, max(self._waiting, key=lambda r: r.priority)))


@PART
@given(small)
def test_priority_displaces_strictly_lower_ones_only(trace):
    watched = Displacing(Priority(chunk_size=12))
    run(watched, trace, max_num_seqs=2, num_blocks=400)
    assert all(victim.priority < head.priority for victim, head in watched.pairs)


def test_equal_priorities_never_throw_each_other_out():
    trace = [Spec(f"r{i}", i * MS, 10, 12, priority=7) for i in range(12)]
    _, summary = served(Priority(), trace, max_num_seqs=2)
    assert summary["preemptions/recompute"] == 0


def test_priority_does_not_hold_while_a_head_that_lost_its_blocks_would_displace_somebody():
    """12 blocks of 4: the urgent one finds 3 free as it comes, and the decodes of its first step take one of them."""
    for arrival in range(1, 12):
        trace = [Spec("a", 0, 16, 12), Spec("b", 0, 16, 12), Spec("urgent", arrival * MS, 9, 4, priority=1)]
        runs = [
            run(Priority(), trace, num_blocks=12, executor=JumpingExecutor(), **changes)
            for changes in ({}, {"fast_forward": False}, {"honour_holds": False})
        ]
        assert runs[0].digest == runs[1].digest == runs[2].digest, arrival


def test_equals_keep_their_order_however_often_they_are_ranked_anew():
    """r7's cached prefix changes while r6 decodes; it stays before r8, which came at the same instant after it."""
    sizes = [(1, 1, None)] * 5 + [(28, 1, range(200, 207)), (45, 6, (0, *range(101, 112))), (29, 1, range(200, 208))]
    sizes.append((5, 1, (0, 1)))
    trace = [
        Spec(f"r{i}", 0, prompt, output, ids=ids if ids is None else tuple(ids), id_width=4)
        for i, (prompt, output, ids) in enumerate(sizes)
    ]
    keys = {"num_blocks": 19, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    assert run(Priority(), trace, **keys).digest == run(Priority(), trace, honour_holds=False, **keys).digest


# -- edf --------------------------------------------------------------------------------------------------------------


def deadlines_met(requests):
    return sum(r._deadline_ns is not None and r.finished_ns <= r._deadline_ns for r in requests.values())


def test_edf_serves_the_earliest_deadline_first_and_meets_more_than_fcfs():
    trace = [request(f"r{i}", 0, 8, 3, deadline_ns=(9 - i) * 4 * MS) for i in range(8)]
    requests, _ = served(EDF(), trace, max_num_seqs=1)
    order = sorted(requests, key=lambda name: requests[name].finished_ns)
    assert order == [f"r{i}" for i in reversed(range(8))]
    trace = [request(f"r{i}", 0, 8, 3, deadline_ns=(9 - i) * 4 * MS) for i in range(8)]
    in_order, _ = served(FCFS(), trace, max_num_seqs=1)
    assert deadlines_met(requests) == 8 and deadlines_met(in_order) <= 5


def test_edf_with_one_default_for_all_is_arrival_order():
    trace = [Spec(f"r{i}", i * MS, 8, 3) for i in range(8)]
    assert order_of(EDF(), trace) == order_of(FCFS(), trace)


# -- slo_aware --------------------------------------------------------------------------------------------------------


def objective(ttft_ms=None, tpot_ms=None):
    scaled = [None if limit is None else limit / 1000 for limit in (ttft_ms, tpot_ms)]
    return SLO(f"{ttft_ms}/{tpot_ms}", *scaled)


def attained(policy):
    """Requests of 20 ms each arrive every 12 ms and want their first token within 50 ms: most must come late."""
    trace = [request(f"r{i:02d}", i * 12 * MS, 8, 20, slo=objective(ttft_ms=50)) for i in range(30)]
    _, summary = served(policy, trace, max_num_seqs=1)
    return summary["slo/attainment"]


def test_slo_aware_meets_more_objectives_than_fcfs_beyond_capacity():
    first_come, aware = attained(FCFS()), attained(SLOAware(ESTIMATOR, patience_s=100.0))
    assert first_come < 0.3 < 0.5 < aware


def test_slo_aware_takes_the_least_slack_first_and_the_late_last():
    slacks = [("late", 1), ("loose", 500), ("tight", 60), ("none", None), ("middle", 200)]
    trace = [request("first", 0, 8, 10), *[request(n, MS, 8, 10, slo=objective(ttft)) for n, ttft in slacks]]
    assert order_of(SLOAware(ESTIMATOR), trace) == ["first", "tight", "middle", "loose", "none", "late"]


def test_slo_aware_gives_nobody_up_at_the_last_moment():
    """Steps that take no time by the estimate: at 5 ms 'edge' can still be served in time, a nanosecond later not."""
    for ttft_ms, order in ((4, ["first", "edge", "none"]), (3.999999, ["first", "none", "edge"])):
        trace = [request("first", 0, 8, 5), request("none", MS, 8, 2)]
        trace.append(request("edge", MS, 8, 2, slo=objective(ttft_ms)))
        assert order_of(SLOAware(LinearEstimator(0.0, 0.0)), trace) == order


def test_slo_aware_counts_the_time_that_a_prompt_takes():
    """Both want their first token after 100 ms; that of 'long' takes 20 ms longer to compute."""
    trace = [request("first", 0, 8, 10)]
    trace += [request(n, MS, prompt, 2, slo=objective(100)) for n, prompt in (("short", 8), ("long", 2008))]
    aware = SLOAware(ESTIMATOR)
    keys = {"max_num_batched_tokens": 2048, "num_blocks": 1000, "max_model_len": 4096}
    assert order_of(aware, trace, **keys) == ["first", "long", "short"]


@pytest.mark.parametrize("tpot_ms, tokens", [(1.2, 18), (1.4, 38), (0.5, 5), (None, 63)])
def test_slo_aware_sizes_chunks_by_what_the_decodes_can_bear(tpot_ms, tokens):
    """A step takes 1 ms and 10 us a token, one of them the decode's."""
    trace = [request("d", 0, 4, 50, slo=objective(None, tpot_ms)), request("p", 3 * MS, 200, 1)]
    steps = log(SLOAware(ESTIMATOR, min_chunk=5), trace, max_num_batched_tokens=64)
    chunks = [sum(tokens for _, _, tokens in prefills) for prefills, decodes in steps if prefills and decodes]
    assert abs(chunks[0] - tokens) <= 1 and len(set(chunks[:-1])) == 1


def taken_before_it(patience_s):
    """How many of a stream of requests with an objective are taken before one without, which came early."""
    trace = [request(f"r{i:02d}", i * 10 * MS, 8, 10, slo=objective(ttft_ms=400)) for i in range(60)]
    order = order_of(SLOAware(ESTIMATOR, patience_s=patience_s), [*trace, request("it", 5 * MS, 8, 10)])
    return order.index("it")


def test_slo_aware_serves_the_patient():
    assert taken_before_it(0.1) <= 12 and taken_before_it(10.0) >= 30


# -- sjf and hrrn -----------------------------------------------------------------------------------------------------


def lengths(*outputs, prompt=8):
    """One runs, the others wait together."""
    return [Spec("first", 0, 4, 12), *[Spec(f"r{n}", MS, prompt, n) for n in outputs]]


def test_sjf_takes_the_shortest_first_and_lowers_the_mean():
    trace = lengths(40, 3, 20, 9, 30, 5)
    order = order_of(SJF(aging_tokens_per_s=1e-6), trace, predictor=OraclePredictor())
    assert order == ["first", "r3", "r5", "r9", "r20", "r30", "r40"]
    sjf, _ = served(SJF(), lengths(40, 3, 20, 9, 30, 5), max_num_seqs=1, predictor=OraclePredictor())
    fcfs, _ = served(FCFS(), lengths(40, 3, 20, 9, 30, 5), max_num_seqs=1)
    assert mean_e2e(sjf) < 0.75 * mean_e2e(fcfs)


def test_sjf_changes_nothing_where_nobody_queues():
    trace = [Spec(f"r{i}", i * 9 * MS, 8, 3 + 5 * (i % 4)) for i in range(12)]
    sjf, _ = served(SJF(), trace, predictor=OraclePredictor())
    chunked, _ = served(ChunkedPrefill(), trace)
    assert {n: r.finished_ns for n, r in sjf.items()} == {n: r.finished_ns for n, r in chunked.items()}


def test_sjf_counts_the_uncached_prompt_alone():
    seed = Spec("seed", 0, 32, 1, ids=tuple(range(8)), id_width=4)
    hit = Spec("hit", 4 * MS, 40, 2, ids=(*range(8), 90, 91), id_width=4)
    trace = [seed, Spec("other", 4 * MS, 20, 2), hit]
    assert order_of(SJF(), trace, predictor=OraclePredictor()) == ["seed", "hit", "other"]


@pytest.mark.parametrize("aging, bound_ms", [(1000.0, 40), (4000.0, 10)])
def test_sjf_serves_a_long_job_within_its_bound(aging, bound_ms):
    """Short jobs (6 tokens of work) come for ever, as fast as they are served; a long one (46 tokens) at 20 ms may be
    overtaken by those that arrive less than 40 / aging seconds after it.
    """
    trace = [Spec(f"s{i:03d}", i * 2 * MS, 4, 2) for i in range(120)] + [Spec("long", 20 * MS, 40, 6)]
    order = order_of(SJF(aging_tokens_per_s=aging), trace, predictor=OraclePredictor())
    arrivals = {spec.name: spec.arrival_ns for spec in trace}
    ahead = [arrivals[name] for name in order[: order.index("long")]]
    assert 20 * MS < max(ahead) <= (20 + bound_ms) * MS


def test_hrrn_takes_the_short_first_and_forgets_nobody():
    """Short jobs come for ever; fcfs would serve the long one at once, hrrn when its wait is the larger multiple."""
    trace = [
        Spec("first", 0, 4, 12),
        Spec("long", MS, 40, 10),
        *[Spec(f"s{i:03d}", 2 * i * MS, 4, 2) for i in range(90)],
    ]
    order = order_of(HRRN(), trace, predictor=OraclePredictor())
    assert order_of(FCFS(), trace).index("long") < 3
    assert 3 < order.index("long") < 80


def test_hrrn_is_between_first_come_and_shortest_first():
    outputs = (60, 4, 50, 8, 40, 6, 30, 10, 5, 7)

    def mean(policy):
        trace = [Spec(f"r{i}", 3 * i * MS, 8, n) for i, n in enumerate(outputs * 3)]
        return mean_e2e(served(policy, trace, max_num_seqs=1, predictor=OraclePredictor())[0])

    assert mean(SJF(aging_tokens_per_s=1e-6)) < mean(HRRN()) < mean(FCFS())


# -- fair -------------------------------------------------------------------------------------------------------------


def flood_and_trickle():
    """a sends 30 requests at once; b sends ten of the same size, one at a time."""
    return [Spec(f"a{i:02d}", 0, 8, 8, client="a") for i in range(30)] + [
        Spec(f"b{i}", i * 20 * MS, 8, 8, client="b") for i in range(10)
    ]


def test_fair_does_not_let_a_flood_hold_up_another_client():
    def worst_wait(policy):
        requests, _ = served(policy, flood_and_trickle(), max_num_seqs=1)
        return max(r.first_scheduled_ns - r._arrival_ns for r in requests.values() if r.client == "b") / MS

    assert worst_wait(FCFS()) > 200
    assert worst_wait(Fair()) < 30


@PART
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=12, max_size=24),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=12, max_size=24),
    st.integers(1, 4),
)
def test_fair_keeps_the_counters_of_backlogged_clients_close(of_a, of_b, slots):
    """The paper's bound while both wait: a difference of at most 2 max(w_p L, w_q M), M the tokens of a batch."""
    trace = [
        Spec(f"{c}{i}", 0, *size, client=c) for c, sizes in (("a", of_a), ("b", of_b)) for i, size in enumerate(sizes)
    ]
    policy = Fair(chunk_size=64, input_weight=1.0, output_weight=2.0)
    made = lab(policy, trace, **{**AMPLE, "max_num_seqs": slots})
    bound = 2 * max(30, 2.0 * slots * 12)
    while made.engine.step():
        if {r.client for r in made.engine.ledger.waiting} == {"a", "b"}:
            assert abs(policy.counter("a") - policy.counter("b")) <= bound


def test_fair_gives_no_credit_for_absence():
    """b comes after a has been served for long: they alternate from there on, b does not catch up."""
    trace = [Spec(f"a{i:02d}", i * MS, 8, 4, client="a") for i in range(40)]
    trace += [Spec(f"b{i}", 120 * MS, 8, 4, client="b") for i in range(6)]
    order = order_of(Fair(), trace)
    late = order[order.index("b0") : order.index("b5") + 1]
    runs = [len(list(group)) for _, group in itertools.groupby(name[0] for name in late)]
    assert max(runs) <= 2


# -- multilevel_feedback ----------------------------------------------------------------------------------------------


def test_multilevel_feedback_lets_the_new_displace_the_served():
    trace = [Spec("long", 0, 8, 60), Spec("short", 20 * MS, 8, 3)]
    keys = {"max_num_seqs": 1, "swap_space_gib": 2000 * 8 / 2**30}
    policy = MultilevelFeedback(quantum=4)
    requests, summary = served(policy, trace, **keys)
    first_come, _ = served(FCFS(), trace, **keys)
    assert requests["short"].finished_ns < 30 * MS < 60 * MS < first_come["short"].finished_ns
    assert summary["preemptions/swap"] == 1 and requests["long"].num_output_tokens == 60


def test_multilevel_feedback_leaves_equals_alone_and_promotes_in_time():
    trace = [Spec("a", 0, 8, 3), Spec("b", MS, 8, 3)]
    assert served(MultilevelFeedback(quantum=8), trace, max_num_seqs=1)[1]["preemptions/recompute"] == 0
    stream = [Spec("long", 0, 8, 30), *[Spec(f"s{i:02d}", (4 + 4 * i) * MS, 8, 4) for i in range(60)]]

    def end_of_long(after_s):
        requests, _ = served(MultilevelFeedback(quantum=4, promote_after_s=after_s), stream, max_num_seqs=1)
        return requests["long"].finished_ns

    assert end_of_long(0.1) < 150 * MS < end_of_long(100.0)


@pytest.mark.parametrize("after_s, times", [(0.005, 0), (0.005000001, 1)])
def test_multilevel_feedback_promotes_at_the_very_moment(after_s, times):
    """'short' comes at 5 ms, when 'long' is promoted and can no longer be displaced, or a nanosecond before.

    Promoted later it does not displace 'short' in turn, which is on the highest level, too.
    """
    trace = [Spec("long", 0, 8, 20), Spec("short", 5 * MS, 8, 2)]
    policy = MultilevelFeedback(quantum=2, promote_after_s=after_s)
    requests, _ = served(policy, trace, max_num_seqs=1, executor=ScriptedExecutor(1))
    assert requests["long"].num_preemptions == times and requests["short"].num_preemptions == 0


@pytest.mark.parametrize(
    "prompt, output, level", [(10, 0, 0), (400, 0, 0), (401, 0, 1), (900, 0, 2), (10, 4, 1), (10, 16, 3), (10, 999, 3)]
)
def test_multilevel_feedback_counts_prompts_and_output(prompt, output, level):
    """Quantum 4: levels end at 4, 8 and 16 tokens of service, of which a prompt token is a hundredth."""
    it = Spec("it", 0, prompt, 1).request()
    it._base_tokens += output
    assert MultilevelFeedback(quantum=4, num_levels=4, prompt_weight=0.01).level_by_service(it) == level
