"""Fleets from the command line: ordinary run directories of replicas, routes, and one line for each mistake."""

import json
import re

import pytest

import schedlab as library
from schedlab.experiments.analysis.table import Comparison
from schedlab.experiments.run import compose
from schedlab.experiments.run.fleet import FleetPlan, Member
from schedlab.experiments.run.fleet_config import fleet_of
from schedlab.framework.errors import ConfigError
from schedlab.framework.results import packed
from schedlab.framework.results.reader import read_run
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.routers.least_requests import LeastRequests
from schedlab.workloads.populations import CommonWork

QUIET = ("engine=virtual", "hardware=h100", "model=llama3.1-8b", "plots=false", "progress=false", "wandb.mode=disabled")
FLEET = ("cluster=replicas", "router=least_requests", "workload=poisson", "workload.num_requests=60", *QUIET)


def routes(folder):
    with packed.opened(packed.find(folder, "routes.jsonl")) as file:
        return [json.loads(line) for line in file]


def test_a_fleet_is_run_directories_and_routes(schedlab, workspace):
    done = schedlab("run", *FLEET, "cluster.replicas=3", "workload.arrivals.rate=60", "hydra.run.dir=out")
    assert done.code == 0, done.err
    fleet, names = read_run(workspace / "out"), ["r0", "r1", "r2"]
    replicas = [read_run(workspace / "out" / "replicas" / name) for name in names]
    told = fleet.result["replicas"]
    assert [one["name"] for one in told] == names
    assert [one["digest"] for one in told] == [one.digest for one in replicas]
    rows = routes(workspace / "out")
    assert len(rows) == 60 == fleet.summary["routed"] == fleet.summary["requests/finished"]
    for name, one, replica in zip(names, told, replicas, strict=True):
        mine = [row["request_id"] for row in rows if row["replica"] == name]
        assert sorted(mine) == sorted(replica.requests["request_id"]) and len(mine) == one["routed"]
        assert fleet.summary[f"replica/{name}/routed"] == len(mine)
    assert fleet.summary["load/imbalance"] >= 1
    assert fleet.summary["replica_seconds"] == pytest.approx(
        3 * max(r.steps["now_ns"][-1] for r in replicas) / 1e9, rel=0.1
    )
    assert fleet.summary["steps"] == sum(replica.summary["steps"] for replica in replicas)
    with pytest.raises(ConfigError, match=r"the steps of a fleet are its replicas', in .*replicas/"):
        fleet.steps  # noqa: B018
    again = schedlab("replay", str(workspace / "out" / "replicas" / "r1"))
    assert again.code == 0 and "the same decisions" in again.out, again.out + again.err


def test_a_comparison_takes_a_fleet_as_one_run(schedlab, workspace):
    assert schedlab("run", *FLEET, "cluster.replicas=2", "hydra.run.dir=all/fleet").code == 0
    assert schedlab("run", *FLEET[2:], "policy=chunked_prefill", "hydra.run.dir=all/one").code == 0
    assert [run.directory.name for run in Comparison.read([workspace / "all"]).runs] == ["fleet", "one"]
    assert len(Comparison.read([workspace / "all/fleet/replicas"]).runs) == 2


@pytest.mark.parametrize("command", ["calibrate", "fidelity"])
def test_a_command_of_one_engine_refuses_a_fleet(command, schedlab):
    done = schedlab(command, "cluster=replicas", "router=least_requests", "engine=cpu", "model=tiny")
    assert done.code == 2
    assert done.err.strip() == f"error: cluster: {command} is of a single engine; expected cluster=single and no router"


def test_a_mixed_fleet_and_fewer_replicas_in_the_same_folder(schedlab, workspace):
    mixed = (
        "cluster.replicas=[{count: 2}, {count: 1, name: old, hardware: a100, policy: chunked_prefill,"
        " engine: {max_num_seqs: 8}}]"
    )
    done = schedlab("run", *FLEET, mixed, "hydra.run.dir=out")
    assert done.code == 0, done.err
    old = read_run(workspace / "out/replicas/old0").manifest
    assert old["config"]["hardware"]["name"] == "a100" == old["config"]["engine"]["hardware"]["name"]
    assert old["engine"]["max_num_seqs"] == 8 and old["policy"]["class"].endswith("ChunkedPrefill")
    assert old["labels"]["replica"] == "old0" and old["labels"]["router"] == "least_requests"
    done = schedlab("run", *FLEET, "cluster.replicas=1", "hydra.run.dir=out")
    assert done.code == 0, done.err
    assert [path.name for path in (workspace / "out/replicas").iterdir()] == ["r0"]


def test_one_replica_from_the_command_is_the_single_engine(schedlab, workspace):
    assert schedlab("run", *FLEET, "cluster.replicas=1", "hydra.run.dir=fleet").code == 0
    assert schedlab("run", *FLEET[2:], "hydra.run.dir=single").code == 0
    fleet, single = read_run(workspace / "fleet"), read_run(workspace / "single")
    assert fleet.result["replicas"][0]["digest"] == single.digest
    assert {key: fleet.summary[key] for key in single.summary} == single.summary
    assert (workspace / "single/replicas").exists() is False


MISTAKES = {
    "router: a fleet needs one, as router=least_requests": ("router=none",),
    "router: a single engine has none": ("cluster=single",),
    "cluster.replicas: expected at least one replica, found none": ("cluster.replicas=[]",),
    "cluster.replicas: count: expected 1 or more, found 0": ("cluster.replicas=0",),
    "cluster.replicas: counts: no such key; did you mean count?": ("cluster.replicas=[{counts: 2}]",),
    "hardware=h1000: no such option": ("cluster.replicas=[{hardware: h1000}]",),
    "cluster.replicas: policy: policy=fcs: no such option; did you mean fcfs?": ("cluster.replicas=[{policy: fcs}]",),
    "cluster.replicas: two replicas are named r0": ("cluster.replicas=[{count: 1}, {count: 1}]",),
    "router.scrape_s: expected 0 s or more, found -1": ("router.scrape_s=-1",),
    "router.choices: expected 1 or more, found 0": ("router=power_of_two", "router.choices=0"),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line):
    words = [word for word in FLEET if "=" in word]
    with pytest.raises(ConfigError, match=re.escape(line)) as caught:
        fleet_of(compose.resolve(compose.compose([*words, *MISTAKES[line]])))
    assert "\n" not in str(caught.value)


def test_a_router_of_ones_own_and_one_that_reads_what_it_does_not_declare(schedlab, workspace):
    (workspace / "mine.py").write_text(
        "from schedlab import Router\n"
        "class Last(Router):\n"
        "    def route(self, request, fleet):\n        return fleet.replicas[-1]\n"
        "class Peeking(Router):\n"
        "    def route(self, request, fleet):\n        return min(fleet.replicas, key=lambda r: r.in_flight)\n"
    )
    words = ("run", *FLEET, "router=custom", "hydra.run.dir=out")
    assert schedlab(*words, "router._target_=mine.Last").code == 0
    assert {row["replica"] for row in routes(workspace / "out")} == {"r3"}
    done = schedlab(*words, "router._target_=mine.Peeking")
    assert done.code == 2
    assert "policy Peeking: reads in_flight of a replica: `needs` must declare 'load'" in done.err
    assert read_run(workspace / "out").status == "failed"


def test_fleets_from_python(tmp_path):
    setup = library.engines.virtual("llama3.1-8b", "h100")
    plan = FleetPlan(LeastRequests(), [Member(f"r{i}", ChunkedPrefill(), setup) for i in range(2)])
    work = CommonWork(num_requests=40)
    first = library.run(ChunkedPrefill(), work, setup, fleet=plan)
    again = library.run(ChunkedPrefill(), work, setup, fleet=plan, out=tmp_path / "run")
    assert first.digest == again.digest == read_run(tmp_path / "run").digest
    assert first.summary["requests/finished"] == 40


POOLS = ("cluster=disaggregated", "router=least_tokens", *FLEET[2:])


def transfers(folder):
    with packed.opened(packed.find(folder, "transfers.jsonl")) as file:
        return [json.loads(line) for line in file]


def test_two_pools_are_run_directories_routes_and_transfers(schedlab, workspace):
    done = schedlab("run", *POOLS, "cluster.decode_router=least_requests", "cluster.prefill=1", "hydra.run.dir=out")
    assert done.code == 0, done.err
    fleet = read_run(workspace / "out")
    assert [one["name"] for one in fleet.result["replicas"]] == ["p0", "d0", "d1"]
    rows, moved = routes(workspace / "out"), transfers(workspace / "out")
    assert fleet.summary["requests/finished"] == 60 and fleet.summary["routed"] == len(rows)
    assert {(row["request_id"], row["replica"]) for row in rows if row["replica"] != "p0"} == {
        (row["request_id"], row["target"]) for row in moved
    }
    assert fleet.summary["transfers"] == len(moved)
    took = [row["done_s"] - row["ready_s"] for row in moved]
    assert fleet.summary["transfer/mean"] == pytest.approx(sum(took) / len(took))
    assert all(row["bytes"] == 131072 * row["tokens"] for row in moved)  # 2 · 32 layers · 8 heads · 128 · 2 bytes
    assert 0 < fleet.summary["link/utilization"] < 1
    assert read_run(workspace / "out/replicas/d1").summary["requests/finished"] > 0
    again = schedlab("replay", str(workspace / "out/replicas/p0"))
    assert again.code == 0 and "the same decisions" in again.out, again.out + again.err
    again = schedlab("replay", str(workspace / "out/replicas/d1"))
    assert again.code == 2 and "a decode replica, whose prompts other replicas computed" in again.err
    again = schedlab("run", *FLEET, "hydra.run.dir=out")
    assert again.code == 0 and not list((workspace / "out").glob("transfers*"))


def test_a_saturated_link_is_seen_in_the_end_to_end_time(schedlab, workspace):
    for name, rate in (("wide", 50), ("narrow", 0.1)):
        done = schedlab(
            "run", *POOLS, f"cluster.link.gb_s={rate}", f"hydra.run.dir={name}", "workload.arrivals.rate=60"
        )
        assert done.code == 0, done.err
    wide, narrow = (read_run(workspace / name).summary for name in ("wide", "narrow"))
    assert narrow["link/utilization"] > 0.6 > wide["link/utilization"] and narrow["e2e/mean"] > 2 * wide["e2e/mean"]


POOL_MISTAKES = {
    "cluster.link.gb_s: expected more than 0 GB/s, found 0": ("cluster.link.gb_s=0",),
    "cluster.link.gbs: no such key": ("+cluster.link.gbs=3",),
    "cluster.prefill: count: expected 1 or more, found 0": ("cluster.prefill=0",),
    "cluster.decode: expected at least one replica, found none": ("cluster.decode=[]",),
    "cluster.first_token: expected prefill or decode, found 'both'": ("cluster.first_token=both",),
    "router=least: no such option": ("cluster.decode_router=least",),
    "expected engine=virtual, found cpu": ("engine=cpu", "model=tiny"),
}


@pytest.mark.parametrize("line", POOL_MISTAKES)
def test_a_mistake_about_pools_is_one_line(line):
    words = [word for word in POOLS if "=" in word]
    with pytest.raises(ConfigError, match=re.escape(line)) as caught:
        fleet_of(compose.resolve(compose.compose([*words, *POOL_MISTAKES[line]])))
    assert "\n" not in str(caught.value)


SIZED = ("slo=chatbot", "capacity.policies=[chunked_prefill]", "capacity.replicates=1", *FLEET)


def test_the_fewest_replicas_that_meet_an_slo(schedlab, workspace):
    words = ("workload.arrivals.rate=120", "workload.num_requests=150", "hydra.run.dir=size")
    done = schedlab("capacity", *SIZED, *words)
    assert done.code == 0, done.err
    (size,) = json.loads((workspace / "size/capacity.json").read_text())["sizes"]
    assert size["replicas"] > 1 and size["attainment"] >= 0.9 > size["fewer"]
    run = ("run", *FLEET, "slo=chatbot", "policy=chunked_prefill", "seed=1", *words[:2], "hydra.run.dir=run")
    assert schedlab(*run, f"cluster.replicas={size['replicas']}").code == 0
    summary = read_run(workspace / "run").summary
    assert size["attainment"] == summary["slo/attainment"] and size["replica_seconds"] == summary["replica_seconds"]
    assert f"| chunked_prefill | 1 | {size['replicas']} |" in (workspace / "size/capacity.md").read_text()


@pytest.mark.parametrize("told", ["cluster=disaggregated", "cluster.replicas=[{count: 2}]"])
def test_only_alike_replicas_are_counted(told, schedlab):
    done = schedlab("capacity", *SIZED, told)
    assert done.code == 2 and "capacity: expected cluster=replicas with a number of alike replicas" in done.err
