"""Prompts in one pool, answers in another: nothing is lost, every block comes back, and links do what they can."""

from dataclasses import replace

import pytest
from four import EVERY
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import MS

from schedlab.framework.cluster.fleet import Timing
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.transfer import Link, Links
from schedlab.framework.errors import ConfigError
from schedlab.framework.source import ListSource
from schedlab.framework.testing.fleets import Chains, run_alone, run_disaggregated, run_fleet
from schedlab.framework.testing.harness import Spec
from schedlab.framework.testing.strategies import limits, specs
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.policies.routers.kv_aware import KvAware
from schedlab.policies.routers.least_requests import LeastRequests
from schedlab.policies.routers.least_tokens import LeastTokens
from schedlab.policies.routers.round_robin import RoundRobin
from schedlab.policies.routers.scored import Scored

LINKS = {"fast": Link(50.0, 1.0), "slow": Link(0.0001, 50.0), "late": Link(1.0, 9000.0)}
"""A token is 8 bytes, so that it takes 80 us over the slow one."""
ROUTERS = {"blind": RoundRobin, "load": LeastRequests, "kv": KvAware, "all": Scored}
FEW = settings(max_examples=settings.default.max_examples // 2)
FAST = LINKS["fast"]


def served(trace, prefill=(FCFS,), decode=(FCFS,), link=FAST, **keys):
    return run_disaggregated(prefill, decode, (RoundRobin(), RoundRobin()), trace, link=link, **keys)


@FEW
@given(
    specs(), limits(), st.sampled_from(sorted(EVERY)), st.sampled_from(sorted(EVERY)), st.sampled_from(sorted(ROUTERS)),
    st.sampled_from(sorted(LINKS)), st.sampled_from(["prefill", "decode"]), st.booleans(), st.integers(1, 2),
)  # fmt: skip
def test_nothing_is_lost_and_looking_ahead_changes_nothing(
    trace, keys, prefill, decode, router, link, first_token, closed, blocks
):
    def outcome(look_ahead):
        source = Chains([trace[i : i + 3] for i in range(0, len(trace), 3)], 3 * MS) if closed else trace
        return run_disaggregated(
            [EVERY[prefill]] * 2, [EVERY[decode]] * 2, (ROUTERS[router](), ROUTERS[router]()), source, link=LINKS[link],
            first_token=first_token, look_ahead=look_ahead, timing=Timing(response_delay_s=0.001, scrape_s=0.004),
            decode_keys={"num_blocks": keys["num_blocks"] * blocks}, **keys,
        )  # fmt: skip

    ours, theirs = outcome(True), outcome(False)
    assert ours.tables.digest == theirs.tables.digest
    assert sorted(request.request_id for request in ours.ends) == sorted(spec.name for spec in trace)
    wanted = {spec.name: spec.output for spec in trace}
    for request in ours.ends:
        if request.state == "finished":
            assert request.num_output_tokens == wanted[request.request_id]
            assert request.arrival_ns < request.first_token_ns <= request.finished_ns
    check_links(ours.moved, LINKS[link])


def check_links(moved, link):
    """No end of a link serves two transfers at once, and none is left idle while somebody waits for both ends."""
    for end in ("source", "target"):
        spans = sorted((getattr(one, end), one.begun_ns, one.free_ns) for one in moved)
        for (name, _, free), (other, begun, _) in zip(spans, spans[1:], strict=False):
            assert name != other or begun >= free
    for one in moved:
        assert one.ready_ns <= one.reserved_ns <= one.begun_ns and one.num_bytes == 8 * one.tokens
        assert one.done_ns - one.begun_ns == link.wire_ns(one.num_bytes) + link.latency_ns
        before = [other.free_ns for other in moved if (other.source == one.source or other.target == one.target)]
        assert one.begun_ns in (one.reserved_ns, *before)


def test_a_prefill_replica_is_a_plain_engine_on_prompts():
    trace = [Spec(f"r{i}", i * 3 * MS, 20 + i, 5, ids=(1, 2, 30 + i), id_width=8) for i in range(9)]
    fleet = served(trace, num_blocks=400)
    prompts = ListSource([replace(spec, output=1).request() for spec in trace])
    assert fleet.digests[0] == run_alone(FCFS, prompts, num_blocks=400).digest


def test_the_first_token_is_shown_by_the_pool_that_is_said_to():
    trace = [Spec("a", 0, 20, 5)]
    at_prefill, at_decode = (served(trace, link=LINKS["late"], first_token=where) for where in ("prefill", "decode"))
    (early,), (late,) = at_prefill.ends, at_decode.ends
    (move,) = at_decode.moved
    assert early.first_token_ns == move.ready_ns == move.begun_ns < move.done_ns < late.first_token_ns
    assert move.done_ns - move.ready_ns == 9 * MS + 19 * 8 and at_prefill.moved[0].tokens == 20
    assert early.num_output_tokens == late.num_output_tokens == 5
    summary = at_prefill.tables.summary
    assert summary["itl/max"] > 0.009 > at_decode.tables.summary["itl/max"]
    assert summary["transfer/mean"] == pytest.approx(0.009, rel=1e-3) and summary["link/wait"] == 0


def test_one_token_needs_no_decode_replica():
    fleet = served([Spec("a", 0, 20, 1), Spec("b", 0, 20, 2)])
    assert [one.request_id for one in fleet.moved] == ["b"] and len(fleet.ends) == 2
    assert [(request.request_id, name) for request, name, _ in fleet.sent] == [("a", "p0"), ("b", "p0"), ("b", "d0")]


def test_a_link_serves_one_transfer_after_the_other():
    links = Links(Link(1.0, 2.0))
    assert links.send(0, 2, 1000, 0) == (0, 1000, 3000)
    assert links.send(0, 3, 500, 100) == (1000, 1500, 3500)  # the way out of 0 is busy
    assert links.send(1, 2, 500, 100) == (1000, 1500, 3500)  # the way into 2 is busy
    assert links.send(1, 3, 100, 2000) == (2000, 2100, 4100)


def test_blocks_are_held_until_they_are_read():
    """A prompt of ten blocks is begun when the one before it has been read, and travels when there is room for it."""
    trace = [Spec(name, 0, 40, 30) for name in "abc"]
    keys = {"num_blocks": 19, "block_size": 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    fleet = served(trace, link=LINKS["late"], **keys)
    a, b, c = fleet.moved
    assert b.ready_ns > a.done_ns and c.ready_ns > b.done_ns
    assert {request.state for request in fleet.ends} == {"finished"}
    ends = {request.request_id: request.finished_ns for request in fleet.ends}
    assert (b.reserved_ns, c.reserved_ns) == (ends["a"], ends["b"]) > (b.ready_ns, c.ready_ns - 1)


def test_what_no_decode_replica_can_hold_is_rejected_with_its_reason():
    fleet = served([Spec("a", 0, 40, 9), Spec("b", 0, 8, 9)], decode_keys={"num_blocks": 4}, block_size=8)
    a, b = sorted(fleet.ends, key=lambda request: request.request_id)
    assert (a.state, a.reason) == ("rejected", "needs 48 tokens of KV cache, the pool holds 32")
    assert b.state == "finished"


class Waiting(Router):
    """Puts each request off once, and turns `c` away."""

    def __init__(self):
        self.seen = set()

    def route(self, request, fleet):
        if request.request_id == "c":
            return fleet.reject("busy")
        if request.request_id in self.seen:
            return fleet.replicas[0]
        self.seen.add(request.request_id)
        return fleet.defer(fleet.now + 0.05)


def test_either_router_can_put_off_and_turn_away():
    trace = [Spec(name, 0, 20, 4) for name in "abc"]
    for routers in ((Waiting(), RoundRobin()), (RoundRobin(), Waiting())):
        fleet = run_disaggregated([FCFS], [FCFS], routers, trace, link=FAST)
        states = {request.request_id: (request.state, request.reason) for request in fleet.ends}
        assert states == {"a": ("finished", None), "b": ("finished", None), "c": ("rejected", "busy")}
        assert fleet.tables.summary["deferred"] == 2


def test_what_is_withdrawn_while_it_waits_for_room_does_not_travel():
    trace = [Spec("a", 0, 60, 40), Spec("b", 0, 60, 4, abort_ns=30 * MS)]
    fleet = served(trace, num_blocks=40, block_size=4, decode_keys={"num_blocks": 26}, max_num_batched_tokens=128)
    assert [one.request_id for one in fleet.moved] == ["a"]
    assert {request.request_id: request.state for request in fleet.ends} == {"a": "finished", "b": "aborted"}


def test_interference_goes_with_a_pool_for_prompts():
    trace = [Spec("long", 0, 8, 80), *(Spec(f"r{i}", (5 + 9 * i) * MS, 400, 2) for i in range(8))]
    keys = {"num_blocks": 400, "max_num_batched_tokens": 512, "max_model_len": 1024}
    shared = run_fleet(FCFS, LeastTokens(), trace, 1, **keys).tables.summary
    apart = served(trace, decode=(lambda: ChunkedPrefill(chunk_size=256),), **keys).tables.summary
    assert apart["itl/max"] < 0.6 * shared["itl/max"]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Link(0.0), "cluster.link.gb_s: expected more than 0 GB/s, found 0.0"),
        (lambda: Link(1.0, -1), "cluster.link.latency_us: expected 0 us or more, found -1"),
        (lambda: served([], prefill=()), "cluster.prefill: expected at least one replica, found none"),
        (lambda: served([], decode=()), "cluster.decode: expected at least one replica, found none"),
    ],
)
def test_a_mistake_is_one_line(make, line):
    with pytest.raises(ConfigError, match=line):
        make()
