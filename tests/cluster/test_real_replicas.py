"""Real engines in one process, each on its busy clock: the tokens of one engine, whoever routes them where."""

import pytest

import schedlab as library
from schedlab.experiments.run.fleet import FleetPlan, Member
from schedlab.experiments.run.offered import read_outputs
from schedlab.framework.errors import ConfigError
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.routers.kv_aware import KvAware
from schedlab.policies.routers.round_robin import RoundRobin
from schedlab.workloads.workload import Recorded

WORK = Recorded(
    name="sample", path="embedded:sample.jsonl.gz", format="mooncake", block_size=16, max_requests=8, time_scale=0.001
)


def setup(**keys):
    return library.engines.cpu("tiny", num_blocks=512, kernels="torch", **keys)


def members(count):
    return [Member(f"r{i}", ChunkedPrefill(), setup()) for i in range(count)]


def test_replicas_make_the_tokens_of_one_engine(tmp_path):
    library.run(ChunkedPrefill(), WORK, setup(), out=tmp_path / "alone")
    expected = dict(read_outputs(tmp_path / "alone"))
    assert len(expected) == 8
    for name, router in {"turns": RoundRobin(), "kv": KvAware()}.items():
        plan = FleetPlan(router, members(2))
        fleet = library.run(ChunkedPrefill(), WORK, plan.members[0].engine, fleet=plan, out=tmp_path / name)
        assert dict(read_outputs(tmp_path / name)) == expected
        own = [dict(read_outputs(tmp_path / name / "replicas" / f"r{i}")) for i in range(2)]
        assert all(own) and own[0] | own[1] == expected and not own[0].keys() & own[1].keys()
        assert fleet.summary["requests/finished"] == 8 and fleet.summary["ttft/mean"] > 0


def test_one_executor_serves_one_replica():
    shared = setup()
    with pytest.raises(ConfigError, match="cluster: replicas r0 and r1 share an executor, which serves one engine"):
        FleetPlan(RoundRobin(), [Member(f"r{i}", ChunkedPrefill(), shared) for i in range(2)])


def test_replicas_that_take_turns_are_not_measured_by_real_time():
    plan = FleetPlan(RoundRobin(), members(2))
    with pytest.raises(ConfigError, match="replicas of one process take turns, so real time measures none of them"):
        library.run(ChunkedPrefill(), WORK, plan.members[0].engine, fleet=plan, clock="wall")
