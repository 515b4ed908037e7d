"""A section that hangs, raises or dies costs itself alone, and what was measured is in the files."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from schedlab.experiments.device import supervisor
from schedlab.experiments.device.sections import Section

HERE = Path(__file__).parent
CHECK = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
inf = float("inf")
from schedlab.experiments.device import supervisor
from schedlab.experiments.device.sections import Section
check = supervisor.Supervisor(Path({folder!r}), "cpu", preloaded=())
check.run([Section(name, f"device_sections:{{name}}", seconds) for name, seconds in {sections!r}])
print("missed" if check.missed else "met")
"""


def check(folder: Path, *sections: tuple[str, float]) -> subprocess.Popen:
    code = CHECK.format(here=str(HERE), folder=str(folder), sections=sections)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def wait_until(true, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.02)


def gone(process: int) -> bool:
    """Ended, or dead and only waiting to be asked for its status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_whatever_a_section_does_the_others_run(tmp_path):
    names = ["good", "ceilings", "raises", "leaves", "crashes", "imports_what_is_not_there", "hangs", "never_lets_go"]
    limits = {"hangs": 2.0, "never_lets_go": 2.0}
    process = check(tmp_path, *((name, limits.get(name, 60.0)) for name in [*names, "after"]))
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and printed.splitlines()[-1] == "missed"
    found = rows(tmp_path)
    failed = {row["section"]: row["note"] for row in found if row["what"] == "failed"}
    assert failed == {
        "raises": "RuntimeError: no such kernel",
        "leaves": failed["leaves"],
        "crashes": failed["crashes"],
        "imports_what_is_not_there": "ModuleNotFoundError: No module named 'schedlab.no_such_module'",
        "hangs": "at its limit of 2 s; see log.txt",
        "never_lets_go": "at its limit of 2 s; see log.txt",
    }
    assert failed["leaves"].startswith("with status 3 after")
    assert failed["crashes"].startswith("by SIGSEGV after")
    before = [row["section"] for row in found if row["what"] == "before"]
    assert before == ["raises", "leaves", "crashes", "hangs", "never_lets_go"]
    assert found[-1]["what"] == "ceilings of another process" and found[-1]["value"] == 2800.0
    assert [line.split()[0] for line in printed.splitlines()[:-1]] == [row["section"] for row in found]
    log = (tmp_path / "log.txt").read_text()
    assert "in hangs" in log and "in never_lets_go" in log and "no such kernel" in log
    summary = json.loads((tmp_path / "device_check.json").read_text())
    assert list(summary["sections"]) == [*names, "after"] and len(summary["rows"]) == len(found)
    assert summary["sections"]["good"]["ended"] == "by itself"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device_check.json", "log.txt", "rows.jsonl"]


def test_what_was_measured_outlives_the_check_and_nothing_runs_on(tmp_path):
    """Killed in its second section: the rows and the summary of the first are there, and the section's process goes."""
    process = check(tmp_path, ("good", math.inf), ("hangs", math.inf))
    wait_until(lambda: (tmp_path / "rows.jsonl").exists() and len(rows(tmp_path)) == 2)
    section = int(rows(tmp_path)[1]["value"])
    assert not gone(section)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    wait_until(lambda: gone(section))
    assert [row["section"] for row in rows(tmp_path)] == ["good", "hangs"]
    summary = json.loads((tmp_path / "device_check.json").read_text())
    assert [row["section"] for row in summary["rows"]] == ["good"]


def test_a_log_is_cut_to_its_end(tmp_path, monkeypatch):
    log = tmp_path / "log.txt"
    log.write_bytes(os.urandom(1 << 16) + b"the end")
    monkeypatch.setattr(supervisor, "LOG_BYTES", 1 << 10)
    supervisor._shorten(log)
    assert log.stat().st_size < 1100 and log.read_bytes().endswith(b"the end")


def test_no_section_begins_after_the_time(tmp_path):
    check = supervisor.Supervisor(tmp_path, "cpu", seconds=-1.0)
    check.run([Section("good", "device_sections:good", 60.0), Section("after", "device_sections:after", 60.0)])
    assert check.skipped == ["good", "after"] and not check.missed
    assert json.loads((tmp_path / "device_check.json").read_text())["skipped"] == ["good", "after"]
