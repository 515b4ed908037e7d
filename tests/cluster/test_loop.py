"""A fleet decides what its parts decide alone: one replica is the plain engine, each of several is one on its rows."""

import pytest
from four import EVERY
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import MS

from schedlab.framework.cluster.fleet import Timing
from schedlab.framework.errors import ConfigError, PolicyStalled
from schedlab.framework.policy import Policy
from schedlab.framework.source import ListSource
from schedlab.framework.testing.fleets import Chains, routed_rows, run_alone, run_fleet
from schedlab.framework.testing.harness import Spec
from schedlab.framework.testing.strategies import limits, specs
from schedlab.policies.common import admit, continue_prefills, decode_all
from schedlab.policies.fcfs import FCFS
from schedlab.policies.routers.least_requests import LeastRequests
from schedlab.policies.routers.least_tokens import LeastTokens
from schedlab.policies.routers.power_of_two import PowerOfTwo
from schedlab.policies.routers.random_choice import RandomChoice
from schedlab.policies.routers.round_robin import RoundRobin
from schedlab.policies.routers.session import Session

ROUTERS = {
    "round_robin": RoundRobin, "random": RandomChoice, "least_requests": LeastRequests,
    "least_tokens": lambda: LeastTokens(prefill_weight=1.0), "power_of_two": PowerOfTwo, "session": Session,
}  # fmt: skip


FEW = settings(max_examples=settings.default.max_examples // 4)


class Gathering(Policy):
    """Idles 7 ms where nothing runs, so that requests come together."""

    def __init__(self):
        self.woke = 0.0

    def schedule(self, step):
        if not step.running and step.now >= self.woke + 0.02:
            self.woke = step.now + 0.007
        if not step.running and len(step.waiting) < 3 and step.now + 1e-6 < self.woke:
            step.idle_until(self.woke)
        elif decode_all(step) and not continue_prefills(step, 16) and not admit(step, step.waiting, 16):
            step.hold()


POLICIES = {**EVERY, "gathering": Gathering}


def chains_of(trace, width=3):
    """The trace as a closed loop: each third request begins a chain of three."""
    return [trace[i : i + width] for i in range(0, len(trace), width)]


@pytest.mark.parametrize("closed", [False, True])
@FEW
@given(specs(), limits(), st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(ROUTERS)), st.sampled_from([0, 7]))
def test_one_replica_is_the_plain_engine(closed, trace, keys, policy, router, think):
    def source():
        return Chains(chains_of(trace), think * MS) if closed else ListSource(
            [spec.request() for spec in sorted(trace, key=lambda spec: spec.arrival_ns)]
        )  # fmt: skip

    alone = run_alone(POLICIES[policy], source(), **keys)
    fleet = run_fleet(POLICIES[policy], ROUTERS[router](), source(), 1, closed_loop=closed, **keys)
    assert fleet.digests == [alone.digest]
    assert {key: fleet.tables.summary[key] for key in alone.summary} == alone.summary
    assert fleet.tables.result["pressure"] == alone.result["pressure"]


@pytest.mark.parametrize("closed", [False, True])
@FEW
@given(specs(), limits(), st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(ROUTERS)), st.sampled_from([1, 7]))
def test_each_replica_decides_as_a_plain_engine_on_what_it_was_sent(closed, trace, keys, policy, router, think):
    source = Chains(chains_of(trace), think * MS) if closed else trace
    fleet = run_fleet(POLICIES[policy], ROUTERS[router](), source, 3, **keys)
    alone = [run_alone(POLICIES[policy], routed_rows(fleet, f"r{i}", trace), **keys).digest for i in range(3)]
    assert fleet.digests == alone
    assert sorted(request.request_id for request in fleet.ends) == sorted(spec.name for spec in trace)


@FEW
@given(specs(), st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(ROUTERS)), st.booleans(), st.integers(0, 9))
def test_looking_ahead_and_nobodys_look_change_nothing(trace, policy, router, closed, delay):
    def fleet(look_ahead, closed_loop):
        source = Chains(chains_of(trace), 3 * MS) if closed else trace
        return run_fleet(
            POLICIES[policy], ROUTERS[router](), source, 3, look_ahead=look_ahead, closed_loop=closed_loop,
            timing=Timing(response_delay_s=delay / 1e3),
        )  # fmt: skip

    first, *others = [fleet(ahead, closed_loop) for ahead in (True, False) for closed_loop in {closed, True}]
    assert all(other.tables.digest == first.tables.digest for other in others)


def long_decodes(n=24):
    return [Spec(f"r{i}", i * 13 * MS, 5 + i % 3, 60 + 7 * (i % 5)) for i in range(n)]


def test_looking_ahead_saves_steps_of_a_closed_loop():
    """Four replicas decode for long: with it, none is called back at each tick of another."""

    def calls(look_ahead):
        fleet = run_fleet(
            FCFS, RoundRobin(), Chains(chains_of(long_decodes(), 2), 40 * MS), 4, look_ahead=look_ahead, num_blocks=400
        )
        return fleet.tables.result["rows"]["steps"], fleet.tables.digest

    (few, ours), (many, theirs) = calls(True), calls(False)
    assert ours == theirs and few < many / 3


def test_news_are_as_old_as_they_are_said_to_be():
    """Two replicas, one request ends at once: whoever hears of it late sends the third to the other one."""
    trace = [Spec("a", 0, 4, 2), Spec("b", 1 * MS, 4, 60), Spec("c", 20 * MS, 4, 2), Spec("d", 40 * MS, 4, 2)]
    soon = run_fleet(FCFS, LeastRequests(), trace, 2)
    late = run_fleet(FCFS, LeastRequests(), trace, 2, timing=Timing(response_delay_s=1.0))
    assert [name for _, name, _ in soon.sent] == ["r0", "r1", "r0", "r0"]
    assert [name for _, name, _ in late.sent] == ["r0", "r1", "r0", "r1"]


def test_what_is_never_woken_is_a_stall_in_a_fleet_too():
    class Asleep(Policy):
        def schedule(self, step):
            step.idle_until()

    with pytest.raises(PolicyStalled, match="never wakes"):
        run_fleet(Asleep, RoundRobin(), [Spec("a", 0, 4, 2), Spec("b", 5 * MS, 4, 2)], 2)


def test_a_name_is_in_a_fleet_once():
    with pytest.raises(ConfigError, match="request a: a request of this name is already in the fleet"):
        run_fleet(FCFS, RoundRobin(), [Spec("a", 0, 4, 20), Spec("a", MS, 4, 2)], 2)


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf")])
def test_a_delay_is_a_time(delay):
    with pytest.raises(ConfigError, match=r"router.response_delay_s: expected 0 s or more, found"):
        Timing(response_delay_s=delay)


def test_a_fleet_has_a_replica():
    with pytest.raises(ConfigError, match="expected at least one replica"):
        run_fleet([], RoundRobin(), [Spec("a", 0, 4, 2)])
