"""An experiment run by the Python of another environment, which has the engine that it needs and not what we have.

The experiment travels as a pickle, with the requests that were loaded here. schedlab comes along by its folder, and
needs numpy there. What is written is an ordinary run directory.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from schedlab.core import PACKAGE
from schedlab.experiments.engines import EngineSetup
from schedlab.experiments.run.progress import ProgressLines, Quiet
from schedlab.framework.errors import ConfigError, SchedlabError
from schedlab.framework.results.reader import read_run
from schedlab.framework.results.tables import RunTables
from schedlab.workloads.trace import Trace

LOG = "engine.log"
TAIL = 3
"""Lines of the other environment's log that are told where it ended without a word."""


class Portable(Protocol):
    """What travels: an `Experiment`, as far as is said here."""

    engine: EngineSetup
    config: Mapping[str, Any]

    @property
    def trace(self) -> Trace: ...


def run_elsewhere(experiment: Portable, out: Path | None, progress: Quiet | None) -> RunTables:
    """Run to the end in `experiment.engine.python`; its tables. With `out`, what it says there is in `engine.log`."""
    assert experiment.trace is not None  # loaded here, so that no reader of traces is needed there
    with tempfile.TemporaryDirectory(prefix="schedlab-") as work:
        directory = Path(work) / "run" if out is None else out
        directory.mkdir(parents=True, exist_ok=True)
        _run(experiment, directory, Path(work), progress is not None and progress.shows)
        tables = read_run(directory)
        if out is None and tables.result["record"] == "full":
            _ = tables.requests, tables.steps, tables.decisions  # else they are read when asked for
        return tables


def _run(experiment: Portable, directory: Path, work: Path, shows: bool) -> None:
    (work / "schedlab").symlink_to(PACKAGE.resolve())
    (work / "job.pickle").write_bytes(_pickled(experiment, directory, shows))
    path = os.pathsep.join([str(work), os.getcwd()])
    environment = {"VLLM_LOGGING_LEVEL": "WARNING", **os.environ, "PYTHONPATH": path}
    words = [str(experiment.engine.python), "-m", __spec__.name, str(work / "job.pickle"), str(work / "error.json")]
    with (directory / LOG).open("w") as log:
        try:
            done = subprocess.run(words, env=environment, stdout=log, stderr=None if shows else log, check=False)
        except OSError as error:
            raise ConfigError(f"engine.python={words[0]}: {error.strerror}") from None
    if (work / "error.json").exists():
        told = json.loads((work / "error.json").read_text())
        raise ConfigError(told["line"]) if told["is_users"] else RuntimeError(told["line"])
    if done.returncode:
        last = (directory / LOG).read_text().splitlines()[-TAIL:]
        raise ConfigError(f"engine.python={words[0]}: ended with {done.returncode}: {' | '.join(last)}")


def _pickled(experiment: Portable, directory: Path, shows: bool) -> bytes:
    there = copy.copy(experiment)
    there.config = dict(experiment.config)  # plain, as Hydra's part of it would need Hydra there
    try:
        return pickle.dumps((there, directory.absolute(), shows, sys.argv))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = experiment.engine.name
        raise ConfigError(f"engine={name}: a part of the run cannot go to its process: {error}") from None


def main(job: Path, error_file: Path) -> int:
    """In the other environment: run what `job` holds; what ends it early goes to `error_file`."""
    try:
        experiment, directory, shows, sys.argv = _unpickled(job)
        experiment.engine = experiment.engine.started(experiment.policy, experiment.predictor)
        experiment.run(directory, ProgressLines(experiment.name, sys.stderr) if shows else None)
    except Exception as error:
        line = " ".join(str(error).split()) if isinstance(error, SchedlabError) else f"{type(error).__name__}: {error}"
        error_file.write_text(json.dumps({"line": line, "is_users": isinstance(error, SchedlabError)}))
        if not isinstance(error, SchedlabError):
            raise
    return 0


def _unpickled(job: Path) -> Any:
    try:
        return pickle.loads(job.read_bytes())
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{sys.executable}: a part of the run cannot be made in this environment: {error}") from None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
