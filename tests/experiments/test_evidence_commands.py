"""timeline, explain and report as commands: what they print, what they leave, and their errors in one line."""

from __future__ import annotations

import json

from schedlab.framework.results import packed

SHORT = ("plots=false", "progress=false", "workload.max_requests=12")
QUICK = ("run", "wandb.mode=disabled", "hydra.run.dir=here", *SHORT)
MODELLED = ("engine=virtual", "model=llama3.1-8b")


def test_a_run_of_moderate_length_leaves_its_timeline(schedlab, workspace):
    assert schedlab(*QUICK, "engine=stub").code == 0
    assert json.loads((workspace / "here/timeline.json").read_text())["traceEvents"]
    (workspace / "here/timeline.json").unlink()
    assert schedlab(*QUICK, "engine=stub", "timeline=0").code == 0
    assert not (workspace / "here/timeline.json").exists()


def test_a_window_of_a_run(schedlab, workspace):
    assert schedlab(*QUICK, "engine=stub", "timeline=0").code == 0
    done = schedlab("timeline", "here", "--stop", "0.5", "--out", "part.json")
    count = len(json.loads((workspace / "part.json").read_text())["traceEvents"])
    assert done.code == 0 and f"{count} events in part.json" in done.out
    wrong = schedlab("timeline", "here", "--start", "2", "--stop", "1")
    assert wrong.code == 2 and "expected 0 <= start < stop" in wrong.err and len(wrong.err.splitlines()) == 1


def test_a_run_is_explained_in_words_and_in_json(schedlab):
    assert schedlab(*QUICK, *MODELLED).code == 0
    told = schedlab("explain", "here")
    assert told.code == 0 and "own prefill" in told.out and "weight movement" in told.out and "as predicted" in told.out
    data = json.loads(schedlab("explain", "here", "--format", "json", "--no-try").out)
    assert data["causes"][0]["name"] == "weight movement" and data["causes"][0]["trial"] is None
    assert schedlab("explain", "here", "--format", "xml").code == 2


def test_a_run_is_reported_on(schedlab, workspace):
    assert schedlab(*QUICK, *MODELLED).code == 0
    done = schedlab("report", "here", "--no-try", "--out", "there.html")
    assert done.code == 0 and "there.html, and 14 pictures in plots" in done.out
    assert "Where the time went" in (workspace / "there.html").read_text()


def test_a_run_without_logs_is_refused(schedlab):
    assert schedlab(*QUICK, "engine=stub", "record=summary").code == 0
    for command in ("timeline", "explain", "report"):
        done = schedlab(command, "here")
        assert done.code == 2 and "record=full" in done.err and len(done.err.splitlines()) == 1
        assert schedlab(command, "nowhere").code == 2


def test_logs_of_another_version_are_named(schedlab, workspace):
    import gzip

    assert schedlab(*QUICK, "engine=stub").code == 0
    path = packed.find(workspace / "here", "decisions.jsonl")
    lines = gzip.compress(b"".join(packed.unpacked(path)).replace(b'"starts":', b'"begins":'))
    path.unlink()
    (workspace / "here/decisions.jsonl.gz").write_bytes(lines)
    done = schedlab("explain", "here")
    assert done.code == 2 and "decisions.jsonl.gz: rows have no 'starts'; another version" in done.err


def test_a_run_that_failed_leaves_a_timeline_as_far_as_it_came(schedlab, workspace):
    (workspace / "mine.py").write_text(
        "from schedlab.policies.fcfs import FCFS\n\n\n"
        "class Breaks(FCFS):\n"
        "    def schedule(self, step):\n"
        "        if step.now > 0.2:\n"
        "            raise RuntimeError('enough')\n"
        "        super().schedule(step)\n"
    )
    failed = schedlab(*QUICK, "engine=stub", "policy=custom", "policy._target_=mine.Breaks")
    assert failed.code == 2 and "enough" in failed.err
    assert schedlab("timeline", "here").code == 0
    assert json.loads((workspace / "here/timeline.json").read_text())["traceEvents"]
    told = schedlab("explain", "here")
    assert told.code == 2 and "the run is failed; expected a finished one" in told.err
