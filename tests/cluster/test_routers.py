"""What routers read is true and as old as it is said to be; what each of them does with it."""

import pytest
from four import EVERY
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import MS

from schedlab.framework.cluster.fleet import Timing
from schedlab.framework.cluster.router import Ended, FirstToken, Router, Sent
from schedlab.framework.cost.estimator import LinearEstimator
from schedlab.framework.errors import ConfigError, PolicyError
from schedlab.framework.request import SLO
from schedlab.framework.testing.fleets import Chains, routed_rows, run_alone, run_fleet
from schedlab.framework.testing.harness import Spec
from schedlab.framework.testing.strategies import specs
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.policies.routers.kv_aware import KvAware
from schedlab.policies.routers.least_requests import LeastRequests
from schedlab.policies.routers.power_of_two import PowerOfTwo
from schedlab.policies.routers.prefix_affinity import PrefixAffinity
from schedlab.policies.routers.round_robin import RoundRobin
from schedlab.policies.routers.scored import Scored, fewest
from schedlab.policies.routers.session import Session
from schedlab.policies.routers.slo import SLORouter

READERS = {
    "kv_aware": KvAware, "kv_aware/warm": lambda: KvAware(temperature=0.5), "scored": Scored,
    "prefix_affinity": lambda: PrefixAffinity(block_size=4, slack=1), "slo": SLORouter,
}  # fmt: skip
ESTIMATOR = LinearEstimator(step=0.001, token=0.00001)
FEW = settings(max_examples=settings.default.max_examples // 2)


def chains_of(trace, width=3):
    return [trace[i : i + width] for i in range(0, len(trace), width)]


@FEW
@given(specs(), st.sampled_from(["fcfs", "prefix_reuse", "sjf"]), st.sampled_from(sorted(READERS)), st.booleans())
def test_what_reads_the_most_changes_nothing_for_the_replicas(trace, policy, router, closed):
    def fleet(look_ahead):
        source = Chains(chains_of(trace), 3 * MS) if closed else trace
        return run_fleet(
            EVERY[policy], READERS[router](), source, 3, look_ahead=look_ahead, estimator=ESTIMATOR,
            timing=Timing(scrape_s=0.004, kv_delay_s=0.002),
        )  # fmt: skip

    ours, theirs = fleet(True), fleet(False)
    assert ours.tables.digest == theirs.tables.digest
    alone = [run_alone(EVERY[policy], routed_rows(ours, f"r{i}", trace)).digest for i in range(3)]
    assert ours.digests == alone


class Looking(Router):
    """Sends in turn, and compares what it is told of each replica with what is there."""

    needs = frozenset({"load", "kv", "gauges"})

    def __init__(self):
        self.turn, self.compared, self.hits, self.events = -1, 0, 0, []

    def route(self, request, fleet):
        for view in fleet.replicas:
            told = (view.in_flight, view.cached_tokens(request), view.as_of_s)
            self._compare(view, told, request, fleet)
        self.turn += 1
        return fleet.replicas[self.turn % len(fleet.replicas)]

    def _compare(self, view, told, request, fleet):
        engine, queue = view._replica.engine, view._replica.queue
        assert fleet.now - 0.01 < told[2] <= fleet.now
        if engine.now_ns > fleet.now_ns:  # a step is on
            return
        self.compared += 1
        assert told[0] == engine.num_unfinished + len(queue._due)
        chain = request.content.chain(request.num_prompt_tokens, view.block_size)
        hit = engine.ledger.cache.longest_hit(chain, (request.num_prompt_tokens - 1) // view.block_size)
        assert told[1] == hit * view.block_size
        self.hits += hit > 0

    def observe(self, event):
        self.events.append(event)


@given(specs(), st.booleans())
def test_what_a_router_is_told_is_so(trace, closed):
    router = Looking()
    source = Chains(chains_of(trace), 3 * MS) if closed else trace
    run_fleet(ChunkedPrefill, router, source, 2, timing=Timing(scrape_s=0.01))
    sent = [event.request.request_id for event in router.events if isinstance(event, Sent)]
    assert sorted(sent) == sorted(spec.name for spec in trace)
    for event in router.events:
        if isinstance(event, (FirstToken, Ended)):
            assert event.request.request_id in sent


def test_the_comparison_above_compares():
    trace = [Spec(f"r{i}", i * 40 * MS, 20, 3, ids=(1, 2, 3), id_width=8) for i in range(8)]
    router = Looking()
    run_fleet(ChunkedPrefill, router, trace, 2, timing=Timing(scrape_s=0.01))
    assert router.compared == 16 and router.hits == 13
    kinds = [type(event).__name__ for event in router.events]
    assert kinds[:4] == ["Sent", "FirstToken", "Ended", "Sent"]


def test_news_of_a_cache_come_late():
    trace = [Spec(f"r{i}", i * 40 * MS, 20, 3, ids=(1, 2, 3), id_width=8) for i in range(4)]
    told = []

    class Asking(RoundRobin):
        needs = frozenset({"kv"})

        def route(self, request, fleet):
            told.append(fleet.replicas[0].cached_tokens(request))
            return fleet.replicas[0]

    run_fleet(FCFS, Asking(), trace, 1)
    run_fleet(FCFS, Asking(), trace, 1, timing=Timing(kv_delay_s=0.07))
    assert told == [0, 16, 16, 16, 0, 0, 16, 16]


@pytest.mark.parametrize(
    ("name", "need"),
    [("in_flight", "load"), ("context_tokens", "load"), ("pending_prefill_tokens", "load"), ("waiting", "gauges"),
     ("running", "gauges"), ("free_blocks", "gauges"), ("as_of_s", "gauges"), ("cached_tokens", "kv")],
)  # fmt: skip
def test_what_is_not_declared_is_not_read(name, need):
    class Peeking(Router):
        def route(self, request, fleet):
            value = getattr(fleet.replicas[0], name)
            return value(request)

    with pytest.raises(PolicyError, match=f"Peeking: reads {name} of a replica: `needs` must declare '{need}'"):
        run_fleet(FCFS, Peeking(), [Spec("a", 0, 4, 2)], 2)


def answering(answer):
    class Answering(Router):
        def route(self, request, fleet):
            return answer(fleet)

    return Answering()


def test_an_answer_is_a_replica_of_the_fleet_a_later_time_or_a_reason():
    kept = []
    run_fleet(FCFS, answering(lambda fleet: kept.append(fleet.replicas[0]) or kept[0]), [Spec("a", 0, 4, 2)], 2)
    for answer in (None, "r0", kept[0]):
        with pytest.raises(PolicyError, match=r"policy Answering on request a: returned .*: expected one of r0, r1"):
            run_fleet(FCFS, answering(lambda fleet, answer=answer: answer), [Spec("a", 0, 4, 2)], 2)
    with pytest.raises(PolicyError, match=r"defers to 0\.0 s at 0 s: expected a later time"):
        run_fleet(FCFS, answering(lambda fleet: fleet.defer(0.0)), [Spec("a", 0, 4, 2)], 2)
    with pytest.raises(PolicyError, match="route raised ZeroDivisionError"):
        run_fleet(FCFS, answering(lambda fleet: 1 / 0), [Spec("a", 0, 4, 2)], 2)
    with pytest.raises(ConfigError, match="expected some of gauges, kv, load, found 'future'"):
        run_fleet(FCFS, type("Wrong", (RoundRobin,), {"needs": {"future"}})(), [Spec("a", 0, 4, 2)], 2)


def test_deferred_and_rejected_requests_are_counted():
    def answer(fleet):
        return fleet.defer(fleet.now + 0.05) if fleet.now < 0.1 else fleet.replicas[0]

    fleet = run_fleet(FCFS, answering(answer), [Spec("a", 0, 4, 2), Spec("b", 1 * MS, 4, 2)], 2)
    assert [ns // MS for _, _, ns in fleet.sent] == [100, 101] and fleet.tables.summary["deferred"] == 4
    assert fleet.tables.summary["requests/finished"] == 2 and fleet.tables.summary["ttft/mean"] > 0.1
    turned = run_fleet(FCFS, answering(lambda fleet: fleet.reject("busy")), [Spec("a", 0, 4, 2)], 2)
    assert turned.tables.summary["requests/rejected"] == 1 and turned.tables.requests["reason"] == ["busy"]
    assert turned.tables.summary["routed"] == 0


# ---- what each router is for ----


def shared_prompts(n=60, kinds=6, gap_ms=5):
    """`kinds` long beginnings, each of a third of the pool, asked for in an order without a pattern."""
    return [
        Spec(f"r{i}", i * gap_ms * MS, 66, 4, ids=(*(100 * (i * i % 7 % kinds) + k for k in range(8)), 1000 + i),
             id_width=8)
        for i in range(n)
    ]  # fmt: skip


KEYS = {"num_blocks": 40, "max_num_batched_tokens": 32, "max_num_seqs": 4}


def served(router, trace, replicas=3, **more):
    return run_fleet(ChunkedPrefill, router, trace, replicas, **KEYS, **more).tables.summary


def test_caches_are_found_again_and_that_pays():
    blind, aware = served(RoundRobin(), shared_prompts()), served(KvAware(), shared_prompts())
    affine = served(PrefixAffinity(block_size=4), shared_prompts())
    assert aware["prefix/hit_rate"] > 1.2 * blind["prefix/hit_rate"]
    assert affine["prefix/hit_rate"] > 1.2 * blind["prefix/hit_rate"]
    assert aware["ttft/mean"] < blind["ttft/mean"]


def test_one_prefix_for_all_does_not_send_all_to_one():
    trace = [Spec(f"r{i}", i * MS, 30, 20, ids=(1, 2, 3, 100 + i), id_width=8) for i in range(60)]
    for router in (PrefixAffinity(block_size=4, slack=4), KvAware(), Scored({"kv": 1, "load": 1})):
        shares = run_fleet(ChunkedPrefill, router, trace, 3, **KEYS).shares
        assert min(shares) >= 10, type(router).__name__


def test_idle_replicas_take_turns():
    """Between requests every load is zero: ties go to whoever was sent the fewest."""
    trace = [Spec(f"r{i}", i * 200 * MS, 6, 2) for i in range(12)]
    for router in (LeastRequests(), KvAware(), PowerOfTwo(choices=3), Scored({"load": 1})):
        assert run_fleet(FCFS, router, trace, 3).shares == [4, 4, 4], type(router).__name__


def test_a_session_stays_where_it_is_and_others_spread():
    trace = [Spec(f"r{i}", i * MS, 6, 2, session=f"s{i % 10}") for i in range(40)]
    fleet = run_fleet(FCFS, Session(), trace, 3, num_blocks=200)
    where = {}
    for request, name, _ in fleet.sent:
        assert where.setdefault(request.session, name) == name
    assert set(where.values()) == {"r0", "r1", "r2"}


def test_slo_fills_one_replica_as_far_as_limits_allow():
    relaxed = [Spec(f"r{i}", i * MS, 6, 30, slo=SLO("slow", ttft_s=9.0)) for i in range(8)]
    tight = [Spec(f"r{i}", i * MS, 6, 30, slo=SLO("fast", tpot_s=0.00128)) for i in range(8)]
    keys = {"estimator": ESTIMATOR, "num_blocks": 200, "max_num_seqs": 8}
    assert run_fleet(FCFS, SLORouter(), relaxed, 3, **keys).shares == [8, 0, 0]
    assert run_fleet(FCFS, SLORouter(margin=0.8), tight, 3, **keys).shares == [3, 3, 2]
    with pytest.raises(PolicyError, match="asks the estimator of r0, which has none"):
        run_fleet(FCFS, SLORouter(), relaxed, 3)


def test_scores_are_relative():
    assert fewest([3, 5, 4]) == [1.0, 0.0, 0.5] and fewest([2, 2]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Scored({"kvs": 1}), "router.weights: expected some of kv, queue, memory, load, found kvs"),
        (lambda: KvAware(temperature=-1), "router.temperature: expected 0 or more, found -1"),
        (lambda: PrefixAffinity(share=0), "router.share: expected more than 0, at most 1, found 0"),
        (lambda: SLORouter(margin=2), "router.margin: expected more than 0, at most 1, found 2"),
        (lambda: SLORouter(chunk_size=0), "router.chunk_size: expected 1 or more, found 0"),
    ],
)
def test_knobs_have_ranges(make, line):
    with pytest.raises(ConfigError, match=line):
        make()
