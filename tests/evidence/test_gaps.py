"""The picture of stalls against the summary, which counts every gap as it happens."""

from __future__ import annotations

import made_up
import numpy as np
import pytest

import schedlab
from schedlab.experiments.analysis import gaps as looking
from schedlab.experiments.analysis.gaps import gaps, longest_gaps
from schedlab.framework.results.reader import read_run
from schedlab.framework.results.tables import RunTables
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.policies.multilevel_feedback import MultilevelFeedback
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.workloads.populations import CommonWork

POLICIES = {
    "fcfs": FCFS, "chunked": ChunkedPrefill, "decode_priority": DecodePriority, "prefix_reuse": PrefixReuse,
    "swap": lambda: ChunkedPrefill(preempt_mode="swap"), "feedback": MultilevelFeedback,
}  # fmt: skip
MODES = {"jumped": {}, "asked": {"honour_holds": False}, "stepped": {"fast_forward": False}}


def run(policy: str, blocks: int, tmp_path, name: str, **keys: object) -> RunTables:
    limits = {"num_blocks": blocks, "max_model_len": 4096, "max_num_seqs": 16, "swap_space_gib": 1.0, **keys}
    engine = schedlab.engines.virtual("llama3.1-8b", "h100", **limits)
    work = CommonWork(num_requests=25, rate=30.0, output=(1, 100))
    schedlab.run(POLICIES[policy](), work, engine, out=tmp_path / name)
    return read_run(tmp_path / name)


@pytest.mark.parametrize(("policy", "blocks"), [("fcfs", 2000), *((policy, 200) for policy in POLICIES)])
def test_the_longest_gap_is_that_of_the_summary_however_the_run_was_executed(policy, blocks, tmp_path):
    pictures = []
    for name, keys in MODES.items():
        tables = run(policy, blocks, tmp_path, name, **keys)
        when, longest = longest_gaps(tables, 40)
        assert longest.max() == pytest.approx(tables.summary["itl/max"], abs=0.6e-6), name
        assert when[-1] == pytest.approx((tables.steps["now_ns"][-1] + tables.steps["duration_ns"][-1]) / 1e9)
        pictures.append(longest)
    for other in pictures[1:]:
        np.testing.assert_array_equal(pictures[0], other)


@pytest.mark.parametrize(("policy", "blocks", "together"), [
    ("fcfs", 2000, True), ("chunked", 2000, True), ("chunked", 200, False), ("swap", 200, False),
    ("feedback", 200, False),
])  # fmt: skip
def test_columns_alone_give_the_same_gaps_where_all_decode_together(policy, blocks, together, tmp_path, monkeypatch):
    found, tables = [], run(policy, blocks, tmp_path, "run", max_chained_steps=3)
    whole = looking.gaps_together

    def noted(*told):
        found.append(whole(*told))
        return found[-1]

    monkeypatch.setattr(looking, "gaps_together", noted)
    picture = longest_gaps(tables, 200)[1]
    assert (found[0] is not None) == together
    monkeypatch.setattr(looking, "gaps_together", lambda *_: None)
    np.testing.assert_array_equal(picture, longest_gaps(tables, 200)[1])


@pytest.mark.parametrize("policy", ["chunked", "decode_priority"])
def test_the_tokens_of_a_chain_come_at_its_end(policy, tmp_path):
    pictures = []
    for name, keys in MODES.items():
        tables = run(policy, 2000, tmp_path, name, max_chained_steps=4, **keys)
        pictures.append(longest_gaps(tables, 40)[1])
        assert pictures[-1].max() == pytest.approx(tables.summary["itl/max"], abs=0.6e-6), name
    np.testing.assert_array_equal(pictures[0], pictures[2])


def test_a_chain_of_a_measured_run_is_one_boundary(tmp_path):
    engine = schedlab.engines.stub(num_blocks=256, max_model_len=2048, max_chained_steps=4)
    schedlab.run(FCFS(), CommonWork(num_requests=6, rate=500.0), engine, out=tmp_path)
    tables = read_run(tmp_path)
    assert tables.steps["repeat"].max() == 4
    assert longest_gaps(tables, 10)[1].max() == pytest.approx(tables.summary["itl/max"], abs=0.6e-6)


def test_jumps_without_rates_are_spread_over_their_duration(tmp_path):
    """A row of three decode steps in 30 ms, after the first token; the stream of the next request begins anew."""
    tables = made_up.run(tmp_path, requests=3)
    tables.requests["first_token_s"] = tables.steps["now_ns"][::2] / 1e9 + 0.02
    tables.requests["finished_s"] = tables.requests["first_token_s"] + 0.03
    assert {round(gap / 1e6, 3) for _, found in gaps(tables) for gap in found.tolist()} == {10.0}


def test_an_empty_run_has_no_gaps(tmp_path):
    assert [len(part) for part in longest_gaps(made_up.run(tmp_path, requests=0), 10)] == [0, 0]
