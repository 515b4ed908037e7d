"""How far it is from a composed configuration to the engine: the files that the call of `run_job` enters on its way."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from schedlab.experiments.run import compose
from schedlab.experiments.run.job import run_job

ENGINE = "engine.py"
MOST_FILES = 12
ROOM = "/schedlab/experiments/"
WORDS = (
    "engine=virtual",
    "model=llama3.1-8b",
    "workload.max_requests=4",
    "progress=false",
    "plots=false",
    "timeline=0",
    "wandb.mode=disabled",
)


class Walk:
    """Files of `experiments` in the order in which calls below `run_job` enter them, until a policy is first asked.

    `climbs` are calls from one file into another that has called it, directly or not.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.climbs: list[tuple[str, str]] = []
        self.asked = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self.asked:
            return
        if frame.f_code.co_qualname.endswith("FCFS.schedule"):
            self.asked = True
            sys.setprofile(None)
        if (file := of_experiments(frame)) is None:
            return
        callers = callers_of(frame)
        if callers and callers[0] != file and file in callers:
            self.climbs.append((callers[0], file))
        if file not in self.files:
            self.files.append(file)


def of_experiments(frame: FrameType) -> str | None:
    """The file that a frame runs, below `experiments/`; None if it is of another folder."""
    return frame.f_code.co_filename.rpartition(ROOM)[2] if ROOM in frame.f_code.co_filename else None


def callers_of(frame: FrameType) -> list[str]:
    """The files of `experiments` that have called, the last first, up to `run_job`."""
    found = []
    while frame.f_code is not run_job.__code__ and frame.f_back is not None:
        frame = frame.f_back
        if (file := of_experiments(frame)) is not None:
            found.append(file)
    return found


def test_a_configuration_is_carried_straight_to_the_engine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["schedlab"])
    walk = Walk()

    def walked(config: Any) -> Any:
        before = sys.getprofile()
        sys.setprofile(walk)
        try:
            return run_job(config)
        finally:
            sys.setprofile(before)

    compose.run_with_overrides(walked, WORDS, "run")
    assert walk.asked and walk.files[0] == "run/job.py"
    assert len({*walk.files, ENGINE}) <= MOST_FILES, walk.files
    assert not walk.climbs
