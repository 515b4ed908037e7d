"""The client's view: stages around a source, and the golden case through the whole engine."""

import math
import statistics
from collections.abc import Iterator

import numpy as np
import pytest
from four import FOUR
from hypothesis import given
from hypothesis import strategies as st
from scripted import MS, ScriptedExecutor

import schedlab
from schedlab.experiments.engines import EngineSetup
from schedlab.framework.content import UniqueContent
from schedlab.framework.engine import EngineConfig
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import EngineRequest
from schedlab.framework.source import ListSource
from schedlab.framework.stages import ClientView, Stage, Staged
from schedlab.workloads.lengths import Uniform
from schedlab.workloads.populations import Synthetic
from schedlab.workloads.source import Terms
from schedlab.workloads.trace import Trace
from schedlab.workloads.workload import Offered, Recorded, make_source


class Rows(Offered):
    """Requests as (arrival in ms, prompt, output); with `think_ms` each follows the one before."""

    def __init__(self, *rows, think_ms=None):
        super().__init__(name="rows")
        self.rows, self.think_ms = rows, think_ms

    def load(self, seed=0):
        arrival, prompt, output = (np.array(column, dtype=np.int64) for column in zip(*self.rows, strict=True))
        n = len(self.rows)
        ties = {}
        if self.think_ms is not None:
            ties = {"after": np.arange(n) - 1, "think_ns": np.full(n, self.think_ms * MS)}
        return Trace("rows", np.arange(n), arrival * MS, prompt, output, **ties)

    def source(self, max_model_len, slo=None, seed=0, *, trace, **_):
        return make_source(trace, Terms(slo=slo))


def run(workload, executor, view, policy="fcfs", **more):
    config = EngineConfig(num_blocks=64, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=512)
    setup = EngineSetup("scripted", executor, config, ("virtual",))
    return schedlab.run(FOUR[policy](), workload, setup, observed_at=view, **more)


def test_the_golden_case_through_the_whole_engine():
    """20 ms of preparation and queue, 80 of prefill, three gaps of 25, 5 of delivery.

    Another request, left out of the window, holds the engine until the golden one has queued for 8 ms.
    """
    view = ClientView(preparation=Stage(per_token_s=0.0006), delivery=Stage(constant_s=0.005))
    workload = Rows((0, 10, 1), (1, 20, 4))  # visible at 6 and at 13 ms
    tables = run(workload, ScriptedExecutor(15, 80, 25), view, start_s=0.0005)
    summary = tables.summary
    for key, ms in {"ttft": 105, "e2e": 180, "tpot": 25, "queue": 8}.items():
        assert summary[f"{key}/mean"] == summary[f"{key}/max"] == pytest.approx(ms / 1e3, abs=1e-9)
    assert summary["itl/mean"] == summary["itl/max"] == 0.025
    assert summary["requests/finished"] == 1 and tables.requests["output_tokens"][1] == 4
    assert tables.result["measurement"]["observed_at"] == "client"
    row = {name: column[1] for name, column in tables.requests.items()}
    stages = [row[name] for name in ("arrival_s", "visible_s", "first_scheduled_s", "first_token_s", "finished_s")]
    assert stages == pytest.approx([0.001, 0.013, 0.021, 0.101, 0.176]) and row["delivery_s"] == 0.005


def test_the_engine_s_view_has_no_stages():
    tables = run(Rows((0, 20, 4)), ScriptedExecutor(80, 25), None)
    assert tables.summary["ttft/mean"] == 0.08 and tables.summary["e2e/mean"] == 0.155
    assert tables.result["measurement"]["observed_at"] == "engine"


def test_a_client_without_stages_is_still_a_client():
    tables = run(Rows((0, 20, 4)), ScriptedExecutor(80, 25), ClientView())
    assert tables.result["measurement"]["observed_at"] == "client" and tables.summary["ttft/mean"] == 0.08


def test_the_next_turn_follows_what_the_client_has_had():
    view = ClientView(delivery=Stage(constant_s=0.005))
    tables = run(Rows((0, 20, 2), (0, 20, 1), think_ms=100), ScriptedExecutor(10), view)
    assert tables.requests["arrival_s"].tolist() == [0, 0.01 + 0.01 + 0.005 + 0.1]


# ---- stages ----


def request(name, arrival_ns=0, prompt=10, **more):
    return EngineRequest(str(name), arrival_ns, prompt, UniqueContent(0), recorded_output_tokens=1, **more)


def drained(source) -> Iterator[tuple[int, EngineRequest]]:
    """(time, request), each popped as soon as the source says that it is due."""
    while (now := source.peek()) is not None:
        due = source.pop(now)
        assert due and source.pop(now) == []
        for one in due:
            yield now, one


@given(rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_requests_come_when_they_are_prepared(rows):
    rows = sorted(rows, key=lambda row: row[0])
    waits = {str(i): wait for i, (_, wait) in enumerate(rows)}
    source = Staged(
        ListSource([request(i, arrival) for i, (arrival, _) in enumerate(rows)]), lambda r: waits[r.request_id]
    )
    got = [(now, r.request_id) for now, r in drained(source)]
    assert got == sorted(
        ((arrival + wait, str(i)) for i, (arrival, wait) in enumerate(rows)), key=lambda x: (x[0], int(x[1]))
    )


def test_a_request_s_own_stages_are_kept():
    own = request("own", visible_ns=7, delivery_ns=9)
    view = ClientView(Stage(constant_s=1.0), Stage(constant_s=1.0))
    ((now, got),) = drained(view.around(ListSource([own]), seed=0))
    assert (now, got.visible_ns, got.delivery_ns) == (7, 7, 9)


def stages_of(view, seed, names):
    source = view.around(ListSource([request(name) for name in names]), seed)
    return {r.request_id: (r.visible_ns, r.delivery_ns) for _, r in drained(source)}


def test_draws_belong_to_seed_stage_and_request_alone():
    view = ClientView(Stage(jitter_s=0.01), Stage(jitter_s=0.01))
    first = stages_of(view, 0, range(100))
    assert first == {**stages_of(view, 0, range(99, -1, -2)), **stages_of(view, 0, range(0, 100, 2))}
    assert all(preparation != delivery for preparation, delivery in first.values())
    assert len({*first.values(), *stages_of(view, 1, range(100)).values()}) == 200


def test_the_log_normal_part_has_its_median_and_shape():
    stage = Stage(constant_s=1.0, jitter_s=0.02, sigma=0.5)
    logs = [math.log(stage.duration_ns(1, b"%d" % i) / 1e9 - 1.0) for i in range(4000)]
    assert statistics.mean(logs) == pytest.approx(math.log(0.02), abs=0.03)
    assert statistics.stdev(logs) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("key", ["constant_s", "per_token_s", "jitter_s", "sigma"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_stage_that_is_no_time(key, value):
    with pytest.raises(ConfigError, match=f"{key}: expected a number of at least 0, found"):
        Stage(**{key: value})


def test_no_policy_shifts_the_stages():
    view = ClientView(Stage(per_token_s=1e-5, jitter_s=0.002), Stage(jitter_s=0.002))
    traffic = Synthetic(
        num_requests=40, arrivals=schedlab.workloads.arrivals.Poisson(50), lengths=Uniform((5, 40), (1, 9))
    )
    seen = []
    for policy in FOUR:
        table = run(traffic, ScriptedExecutor(2), view, policy).requests
        order = np.argsort(table["source_row"])
        seen.append({name: table[name][order].tolist() for name in ("arrival_s", "visible_s", "delivery_s")})
    assert all(stages == seen[0] for stages in seen)
    assert sorted(seen[0]["visible_s"]) != seen[0]["visible_s"], "no request overtook another"


@pytest.mark.parametrize("sessions", [False, True])
def test_a_client_s_run_replays_from_its_own_folder(tmp_path, sessions):
    """Stages that were drawn are part of the workload; the next turn waits for the delivery of the one before."""
    view = ClientView(Stage(jitter_s=0.02), Stage(jitter_s=0.02))
    traffic = Rows(*[(i, 20, 1 + i % 5) for i in range(30)], think_ms=3 if sessions else None)
    first = run(traffic, ScriptedExecutor(2), view, out=tmp_path / "run")
    again = run(Recorded(path=str(tmp_path / "run")), ScriptedExecutor(2), None)
    assert again.digest == first.digest and again.summary == first.summary
    assert again.result["measurement"] == first.result["measurement"]
    order = np.argsort(first.requests["visible_s"], kind="stable")
    assert sessions or (np.diff(first.requests["arrival_s"][order]) < 0).any(), "no request overtook another"


# ---- by Hydra ----


def test_stages_are_configured_by_name(schedlab):
    from schedlab.framework.results.reader import read_run

    quick = ("engine=stub", "wandb.mode=disabled", "plots=false", "workload.max_requests=6", "hydra.run.dir=out")
    plain, staged = ("run", *quick), ("observed_at.preparation.constant_s=0.5", "observed_at.delivery.jitter_s=0.1")
    assert schedlab(*plain, "hydra.run.dir=engine").code == 0
    done = schedlab(*plain, "observed_at=client", *staged)
    assert done.code == 0, done.err
    engine, client = read_run("engine"), read_run("out")
    assert [r.result["measurement"]["observed_at"] for r in (engine, client)] == ["engine", "client"]
    prepared = client.requests["visible_s"] - client.requests["arrival_s"]
    assert prepared == pytest.approx(np.full(6, 0.5)) and len(set(client.requests["delivery_s"])) == 6
    bad = schedlab(*plain, "observed_at=client", "observed_at.delivery.sigma=-1")
    assert bad.code == 2 and "sigma: expected a number of at least 0, found -1" in bad.err
