"""Every option of `workload` and `slo` composes, and is the object that it names."""

from pathlib import Path

import pytest

from schedlab import conf
from schedlab.experiments.run import compose
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO
from schedlab.workloads.readers import table
from schedlab.workloads.workload import Offered, Recorded

CONF = Path(conf.__file__).parent


def options(group: str) -> list[str]:
    found = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    assert found, f"no options of {group} in {CONF}"
    return found


NEED_MORE = {"servegen": "workload servegen needs workload.clients", "text": "workload text needs workload.tokenizer"}


@pytest.mark.parametrize("name", NEED_MORE)
def test_workloads_that_need_more_say_so(name):
    with pytest.raises(ConfigError, match=NEED_MORE[name]):
        compose.build(compose.compose([f"workload={name}"]).workload, "workload").load()


@pytest.mark.parametrize("name", [name for name in options("workload") if name not in NEED_MORE])
def test_workloads(name):
    workload = compose.build(compose.compose([f"workload={name}"]).workload, "workload")
    assert isinstance(workload, Offered) and workload.name == name
    if isinstance(workload, Recorded) and workload.path is None:
        said = f"workload {name} needs workload.path" + ("; obtain the file from http" if name != "trace" else "")
        with pytest.raises(ConfigError, match=said):
            workload.load()
    else:
        trace = workload.load()
        assert len(trace) >= 100 and workload.describe(trace=trace).startswith(f"{name}: ")


@pytest.mark.parametrize("name", options("slo"))
def test_slos(name):
    slo = compose.build(compose.compose([f"slo={name}"]).slo, "slo")
    assert isinstance(slo, SLO) and slo.name == name


def test_recorded_options_have_all_keys():
    fields = set(Recorded.__dataclass_fields__)
    keys = {str(k) for k in compose.compose(["workload=trace"]).workload}
    assert keys - {"_target_"} == fields


def test_columns_of_a_table_need_no_plus(tmp_path):
    """Every column of ours is a key of the configuration, so that `workload.columns.arrival=ts` works."""
    composed = compose.compose(["workload=trace"]).workload.columns
    assert set(composed) == table.OURS and all(name is None for name in composed.values())
    path = tmp_path / "t.csv"
    path.write_text("ts,prompt_tokens,output_tokens,rank,patience\n1.5,4,8,3,9\n2,5,9,1,\n")
    words = ["format=table", f"path={path}", "time_unit=s", "columns.arrival=ts", "columns.priority=rank"]
    words += ["columns.abort=patience", "priority_order=smaller_first"]
    config = compose.compose(["workload=trace", *(f"workload.{word}" for word in words)])
    trace = compose.build(config.workload, "workload").load()
    assert trace.arrival_ns.tolist() == [0, 500_000_000] and trace.priority.tolist() == [-3, -1]
    assert trace.abort_ns.tolist() == [9_000_000_000, -1]


def part(name: str, **keys: object) -> dict[str, object]:
    return {"_target_": f"schedlab.{name}", **keys}


POISSON = part("workloads.arrivals.Poisson", rate=1.0)
FIXED = part("workloads.lengths.Fixed", prompt=5, output=5)
LOGNORMAL = {"prompt_median": 5, "prompt_sigma": 1, "output_median": 5, "output_sigma": 1}
RATED = {"Poisson": {}, "Gamma": {"cv": 1}, "Weibull": {"shape": 1}, "Constant": {}}


def synthetic(**keys: object) -> dict[str, object]:
    parts = {"arrivals": POISSON, "lengths": FIXED, "num_requests": 5, **keys}
    return part("workloads.populations.Synthetic", **parts)


def length(name: str, **keys: object) -> dict[str, object]:
    return synthetic(lengths=part(f"workloads.lengths.{name}", **keys))


def sample(**keys: object) -> dict[str, object]:
    return part("workloads.workload.Recorded", path="embedded:sample.jsonl.gz", format="mooncake", **keys)


def talks(**keys: object) -> dict[str, object]:
    parts = {"arrivals": POISSON, "lengths": FIXED, "num_sessions": 5, **keys}
    return part("workloads.sessions.Conversations", **parts)


WRONG = [
    *(("arrivals.rate", synthetic(arrivals=part(f"workloads.arrivals.{name}", rate=-3, **keys)))
      for name, keys in RATED.items()),
    ("arrivals.cv", synthetic(arrivals=part("workloads.arrivals.Gamma", rate=1, cv=0))),
    ("arrivals.shape", synthetic(arrivals=part("workloads.arrivals.Weibull", rate=1, shape=float("nan")))),
    ("arrivals.count", synthetic(arrivals=part("workloads.arrivals.AllAtOnce", count=0))),
    ("arrivals.points", synthetic(arrivals=part("workloads.arrivals.RateCurve", points=[[0, 1]], gaps=POISSON))),
    ("arrivals.gaps.rate", synthetic(
        arrivals=part("workloads.arrivals.RateCurve", points=[[0, 1], [1, 1]], gaps={**POISSON, "rate": 0}))),
    ("clients.chat.arrivals.rate", synthetic(
        arrivals=None, lengths=None,
        clients={"chat": part("workloads.populations.Client", arrivals={**POISSON, "rate": -1}, lengths=FIXED)})),
    ("lengths.prompt", length("Fixed", prompt=0, output=1)), ("lengths.output", length("Fixed", prompt=1, output=0)),
    ("lengths.prompt", length("Uniform", prompt=[5, 4], output=[1, 1])),
    ("lengths.output", length("Uniform", prompt=[4, 5], output=[1])),
    *((f"lengths.{key}", length("Lognormal", **{**LOGNORMAL, key: -2})) for key in (*LOGNORMAL, "correlation")),
    *((f"prefixes.{key}", synthetic(
        prefixes=part("workloads.prefixes.SystemPrompts", **{"count": 1, "tokens": 5, key: -1})))
      for key in ("count", "tokens", "zipf", "share", "block_size")),
    ("num_requests", synthetic(num_requests=0)), ("slo_classes.urgent.ttft_s", synthetic(
        slo_classes={"urgent": part("framework.request.SLO", ttft_s=-1)})),
    ("rate", part("workloads.populations.CommonWork", rate=0)),
    ("prompt", part("workloads.populations.CommonWork", prompt=[2, 1])),
    ("num_sessions", talks(num_sessions=0)), ("turns", talks(turns=0.5)), ("max_context", talks(max_context=1)),
    ("think.mean_s", talks(think=part("workloads.sessions.ThinkTime", mean_s=-1))),
    ("users", part("workloads.sessions.ClosedLoop", users=0, num_requests=4, lengths=FIXED)),
    ("duration_s", part("workloads.servegen.ServeGen", clients=["x"], duration_s=0)),
    ("target_rate", part("workloads.servegen.ServeGen", clients=["x"], target_rate=-1)),
    *((key, sample(**{"block_size": 16, key: value})) for key, value in {
        "time_scale": 0, "think_scale": -1, "target_rate": -1, "max_requests": 0, "window": [2, 1], "jitter_s": -1,
        "block_size": 0, "max_span_s": 0, "gap": "x", "hash_scope": "x", "priority_order": "x", "time_unit": "x",
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize(("key", "keys"), WRONG)
def test_a_wrong_value_is_named_by_its_whole_key(key, keys):
    with pytest.raises(ConfigError, match=rf"^workload\.{key}[=:]"):
        compose.build(keys, "workload").load()
