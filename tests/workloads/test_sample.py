"""The embedded sample is what its README says, and made by the script beside it."""

import gzip
import json
from importlib.resources import files

import numpy as np

from schedlab.workloads.data.make_sample import sample
from schedlab.workloads.workload import Recorded

PATH = files("schedlab.workloads") / "data" / "sample.jsonl.gz"
WORKLOAD = Recorded(name="sample", path="embedded:sample.jsonl.gz", format="mooncake", block_size=16)


def test_the_script_makes_the_file():
    with gzip.open(str(PATH), "rt") as file:
        assert [json.loads(line) for line in file] == sample()


def test_it_has_what_schedulers_are_judged_by():
    trace = WORKLOAD.load()
    assert 200 <= len(trace) <= 400 and 20 <= trace.span_s <= 30
    assert 16 <= trace.prompt_tokens.min() and trace.prompt_tokens.max() <= 1500
    assert 4 <= trace.output_tokens.min() and trace.output_tokens.max() <= 96
    assert np.unique(trace.session.codes[trace.session.codes >= 0]).size == 48
    assert (trace.after >= 0).sum() > 60, "turns that wait for the turn before"
    busiest = np.bincount(trace.arrival_ns // 10**9)
    assert busiest.argmax() == 12 and busiest.max() > 3 * np.median(busiest)
    beginnings = np.unique(trace.ids.values[trace.ids.offsets[:-1]], return_counts=True)[1]
    assert np.sort(beginnings)[-2:].min() > 20, "two system prompts"


def test_both_ways_of_replaying_its_sessions():
    tied, recorded = WORKLOAD.load(), Recorded(**{**vars(WORKLOAD), "sessions": "recorded"}).load()
    assert recorded.after is None and np.array_equal(tied.arrival_ns, recorded.arrival_ns)
