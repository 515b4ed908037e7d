"""The kit passes every router that ships, and finds what is seeded."""

import random

import pytest

from schedlab.framework.cluster.router import Router
from schedlab.framework.testing.routers import check_router_contract
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.routers.kv_aware import KvAware
from schedlab.policies.routers.least_requests import LeastRequests
from schedlab.policies.routers.least_tokens import LeastTokens
from schedlab.policies.routers.power_of_two import PowerOfTwo
from schedlab.policies.routers.prefix_affinity import PrefixAffinity
from schedlab.policies.routers.random_choice import RandomChoice
from schedlab.policies.routers.round_robin import RoundRobin
from schedlab.policies.routers.scored import Scored
from schedlab.policies.routers.session import Session
from schedlab.policies.routers.slo import SLORouter

SHIPPED = (
    KvAware, LeastRequests, LeastTokens, PowerOfTwo, PrefixAffinity, RandomChoice, RoundRobin, Scored, Session,
    SLORouter,
)  # fmt: skip


@pytest.mark.parametrize("router", SHIPPED)
def test_every_router_that_ships_keeps_the_contract(router):
    assert check_router_contract(router, ChunkedPrefill, traces=4) == []


class Undeclared(Router):
    def route(self, request, fleet):
        return min(fleet.replicas, key=lambda replica: replica.in_flight)


class Undecided(Router):
    def route(self, request, fleet):
        return random.choice(fleet.replicas)  # of the process's own stream, which no seed of a run sets


class First(Router):
    def route(self, request, fleet):
        return fleet.replicas[0]


class FirstTwo(Router):
    turn = 0

    def route(self, request, fleet):
        self.turn += 1
        return fleet.replicas[self.turn % 2]


class FirstBlock(Router):
    """By a hash of the first part of the prompt, which all share."""

    def route(self, request, fleet):
        keys = fleet.prefix(request, 4).keys
        return fleet.replicas[keys[0][0] % len(fleet.replicas) if keys else 0]


class Later(Router):
    """Never lets go of what it once put off."""

    def route(self, request, fleet):
        return fleet.defer(fleet.now - 1)


@pytest.mark.parametrize(
    ("router", "broken", "told"),
    [
        (Undeclared, "contract", "reads in_flight of a replica"),
        (Undecided, "determinism", "other ways twice"),
        (First, "sends all to one", "120, 0, 0"),
        (FirstTwo, "starves a replica", "60, 60, 0"),
        (FirstBlock, "sends all to one", "of 120 alike requests"),
        (Later, "contract", "expected a later time"),
    ],
)
def test_a_seeded_fault_is_found(router, broken, told):
    faults = {fault.property: fault.told for fault in check_router_contract(router, ChunkedPrefill, traces=2)}
    assert told in faults[broken]
