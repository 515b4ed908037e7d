"""`schedlab policy check`: Hydra's words, a report, programs for failures in the output folder, an exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

from schedlab.experiments import cli

MINE = """
from dataclasses import dataclass
from schedlab.policies.chunked_prefill import ChunkedPrefill

@dataclass
class Mine(ChunkedPrefill):
    greed: int = 0

    def schedule(self, step):
        if self.greed:
            step._budget += self.greed
        super().schedule(step)
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Calls the command in an empty folder that has mine.py; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(MINE)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["schedlab", "policy", "check", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


CUSTOM = ("policy=custom", "policy._target_=mine.Mine", "check.only=[audit,inputs]", "check.seconds=2")


def test_a_policy_that_conforms_exits_with_0(check):
    code, out, err = check(*CUSTOM)
    assert code == 0, err
    assert out.startswith("Mine: 2 pass\n") and "audit        pass" in out


def test_a_policy_that_does_not_exits_with_1_and_leaves_programs(check, tmp_path):
    code, out, _ = check(*CUSTOM, "+policy.greed=40")
    assert code == 1
    assert "audit        FAIL" in out and "inputs       FAIL" in out
    programs = [line.rpartition(" ")[2] for line in out.splitlines() if line.startswith("to see it again")]
    assert len(programs) == 2
    done = subprocess.run([sys.executable, programs[0]], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "audit: granted" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "words, says",
    [
        (("check.only=[wating]",), "check.only: wating is no property; did you mean waiting?"),
        (("check.seconds=long",), "check.seconds: expected a number, found 'long'"),
        (("policy=nope",), "policy=nope: no such option"),
        (("check.against=[nope]",), "check.against: policy=nope: no such option"),
    ],
)
def test_mistakes_are_one_line(check, words, says):
    code, _, err = check(*words)
    assert code == 2 and err.startswith(f"error: {says}") and err.count("\n") == 1
