"""The embedded sample is what its README says: the recording of a run of the requests that the script draws."""

import gzip
import json
from importlib.resources import files

import numpy as np

from schedlab.workloads.data.make_sample import sample
from schedlab.workloads.statistics import reuse, reuse_with_memory
from schedlab.workloads.workload import Recorded

PATH = files("schedlab.workloads") / "data" / "sample.jsonl.gz"
WORKLOAD = Recorded(name="sample", path="embedded:sample.jsonl.gz", format="mooncake", block_size=16)


def test_it_is_a_recording_of_the_requests_that_the_script_draws():
    with gzip.open(str(PATH), "rt") as file:
        recorded = [json.loads(line) for line in file]

    def drawn(row, zero):
        """A request without what the run added: exact times, and the stamp of a later turn."""
        kept = {k: v for k, v in row.items() if k not in ("arrival_ns", "think_ns", "timestamp")}
        if "delay" not in kept:
            kept["timestamp"] = row["timestamp"] - zero
        return json.dumps(kept, sort_keys=True)

    first = sample()[0]["timestamp"]
    assert sorted(drawn(row, 0) for row in recorded) == sorted(drawn(row, first) for row in sample())
    assert all("timestamp" in row for row in recorded)


def test_it_has_what_schedulers_are_judged_by():
    trace = WORKLOAD.load()
    assert len(trace) == 254 and round(trace.span_s) == 23
    assert trace.prompt_tokens.min() >= 16 and trace.prompt_tokens.max() <= 1500
    assert trace.output_tokens.min() >= 4 and trace.output_tokens.max() <= 96
    assert np.unique(trace.session.codes[trace.session.codes >= 0]).size == 48
    assert (trace.after >= 0).sum() == 97, "turns that wait for the turn before"
    busiest = np.bincount(trace.arrival_ns // 10**9)
    assert busiest.argmax() == 12 and busiest.max() > 3 * np.median(busiest)
    beginnings = np.unique(trace.ids.values[trace.ids.offsets[:-1]], return_counts=True)[1]
    assert np.sort(beginnings)[-2:].min() > 20, "two system prompts"
    assert f"{reuse(trace).prefix:.1%} {reuse_with_memory(trace, 256 * 16):.1%}" == "60.2% 45.2%"


def test_both_ways_of_replaying_its_sessions():
    tied, recorded = WORKLOAD.load(), Recorded(**{**vars(WORKLOAD), "sessions": "recorded"}).load()
    assert recorded.after is None and np.array_equal(tied.arrival_ns, recorded.arrival_ns)
