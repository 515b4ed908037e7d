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
