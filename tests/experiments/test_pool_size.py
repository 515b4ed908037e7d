"""`schedlab capacity workload=online_offline`: the most batch work beside people who wait."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.experiments.studies.pool_size import most

WORDS = (
    "capacity", "workload=online_offline", "workload.duration_s=4", "engine=virtual", "hardware=h100",
    "model=llama3.1-8b", "capacity.policies=[priority,chunked_prefill]", "capacity.replicates=1",
    "workload.slo_classes.online.ttft_s=0.05", "workload.pool_requests=400", "workload.pool=1",
    "hydra.run.dir=out",
)  # fmt: skip


@given(st.integers(0, 300), st.integers(1, 300))
def test_the_largest_that_is_borne_is_found(edge, limit):
    tried = []

    def bears(size):
        tried.append(size)
        return size <= edge

    assert most(bears, limit) == min(edge, limit)
    assert len(tried) == len(set(tried)) <= 18 and max(tried) <= limit


def test_the_pool_is_as_large_as_the_online_requests_bear(schedlab, workspace):
    done = schedlab(*WORDS)
    assert done.code == 0, done.err
    told = json.loads((workspace / "out" / "capacity.json").read_text())["pools"]
    priority, plain = told
    assert priority["policy"] == "priority" and priority["size"] > plain["size"]
    for one in told:
        assert one["more"] is None or one["more"] < 0.9
        assert one["attainment"] is None or one["attainment"] >= 0.9
    assert priority["offline_tokens_per_s"] > 0
    assert "online: SLO met" in done.out and "| priority |" in (workspace / "out" / "capacity.md").read_text()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("workload.pool_requests=8", "workload.pool_requests: expected more than are served in 4 s, found 8"),
        ("workload.patience={retries: 1}", "workload.patience: capacity offers each request once"),
        ("workload.slo_classes.online.ttft_s=null", "workload.slo_classes.online: expected a limit"),
    ],
)
def test_what_cannot_be_sized_is_one_line(schedlab, word, said):
    more = ("workload.slo_classes.online.tpot_s=null",) if "ttft" in word else ()
    done = schedlab(*WORDS, word, *more)
    assert done.code == 2 and said in done.err, done.err
