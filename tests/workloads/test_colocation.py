"""Chat that arrives by itself and a closed pool of batch work beside it."""

import numpy as np
import pytest

import schedlab
from schedlab.experiments.run import compose
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO
from schedlab.policies.priority import Priority
from schedlab.workloads.arrivals import Poisson
from schedlab.workloads.colocation import OnlineOffline
from schedlab.workloads.lengths import Uniform
from schedlab.workloads.workload import make_source

CLASSES = {"online": SLO("online", ttft_s=0.5), "offline": SLO("offline")}


def workload(**keys):
    given = {
        "duration_s": 4.0, "arrivals": Poisson(5.0), "lengths": Uniform([20, 40], [5, 9]), "pool": 3,
        "pool_lengths": Uniform([200, 300], [10, 30]), "pool_requests": 600, "slo_classes": CLASSES, **keys,
    }  # fmt: skip
    return OnlineOffline(**given)


def test_so_many_batch_requests_are_there_at_any_time_until_the_end():
    result = schedlab.run(Priority(), workload(), schedlab.engines.virtual("llama3.1-8b", "h100"))
    requests = result.requests
    batch = np.array([client == "offline" for client in requests["client"]])
    begin, end = requests["arrival_s"][batch], requests["finished_s"][batch]
    for at in np.linspace(0.01, 3.9, 60):
        assert ((begin <= at) & (at < end)).sum() in (2, 3), "one may have ended at this instant"
    assert begin.max() < 4.0 and requests["arrival_s"][~batch].max() < 4.0
    assert result.summary["class/offline/slo_attainment"] is None
    assert result.summary["slo/attainment_limited"] == result.summary["class/online/slo_attainment"]
    assert result.summary["class/offline/output_tokens_per_s"] > 0


def test_the_pool_changes_nothing_of_what_is_sent_online():
    def online(trace):
        mine = np.array([client == "online" for client in trace.client.tolist()])
        return [column[mine].tolist() for column in (trace.arrival_ns, trace.prompt_tokens, trace.output_tokens)]

    small, large = (workload(pool=pool).load(3) for pool in (1, 8))
    assert online(small) == online(large) and len(set(small.source_row.tolist())) == len(small)
    assert (small.priority == [int(client == "online") for client in small.client.tolist()]).all()
    assert len(make_source(large, workload().terms(None, 0, None)).pop(0)) == 8


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pool": 0}, "workload.pool=0, expected 1 to pool_requests=600"),
        ({"slo_classes": {"online": SLO("online", ttft_s=1.0)}}, "expected online and offline, offline is not there"),
    ],
)
def test_wrong_pools_are_one_line(keys, words):
    with pytest.raises(ConfigError, match=words):
        workload(**keys)


def test_the_shipped_one_is_of_both_kinds():
    made = compose.build(compose.compose(["workload=online_offline"]).workload, "workload")
    assert made.slo_classes["online"].limited and not made.slo_classes["offline"].limited
    assert made.stop_after_s == made.duration_s
