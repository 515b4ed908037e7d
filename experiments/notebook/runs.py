"""`schedlab.run`, `sweep` and `load`: runs from Python, and runs that lie in a folder.

A sweep's jobs travel to their processes by value, so that a class which a notebook's cell defines travels as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from schedlab.experiments.analysis.table import FIGURES, Comparison, Run, figures_of, headlines
from schedlab.experiments.notebook.shown import Row, Shown, frame, visible
from schedlab.experiments.run.api import Experiment
from schedlab.experiments.run.progress import counting, progress_of
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.reader import read_run
from schedlab.framework.results.tables import SCHEMAS, Columns, RunTables
from schedlab.framework.results.writer import write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from schedlab.experiments.notebook.studies import Compared, Plotted

PICTURES = ("latency_cdf", "itl_over_time", "batch_composition", "occupancy")
Payload = bytes
"""A job: its folder, and the parts, words and keys of its experiment."""


# ---- results ----


@dataclass
class RunResult(RunTables, Shown):
    """`.summary`, `.requests`, `.steps`, `.decisions` (columns by name), `.digest`; requests in order of arrival.

    `directory` is None for a run that left no files.
    """

    directory: Path | None = field(default=None, repr=False)

    @classmethod
    def of(cls, tables: RunTables, directory: Path | None = None) -> Self:
        own = {f.name: getattr(tables, f.name) for f in fields(RunTables)}
        return cls(**own, directory=directory)

    @cached_property
    def requests(self) -> Columns:
        return in_order(self.load("requests"), "arrival_s")

    def rows(self) -> list[Row]:
        """The requests."""
        return [dict(zip(self.requests, row, strict=True)) for row in zip(*plain(self.requests).values(), strict=True)]

    def table(self) -> list[Row]:
        known = [figure for figure in figures_of(self.summary) if self.summary.get(figure.key) is not None]
        figures = [*FIGURES, *(figure for figure in known if figure not in FIGURES)]
        shown = ((figure.heading, figure.write(self.summary.get(figure.key))) for figure in figures)
        return [{"figure": heading, "value": text} for heading, text in shown]

    def to_pandas(self, table: str = "requests") -> Any:
        """A pandas.DataFrame of `requests`, `steps` or `decisions`."""
        return frame("pandas", plain(self._columns(table)))

    def to_polars(self, table: str = "requests") -> Any:
        """A polars.DataFrame of `requests`, `steps` or `decisions`, whose nested values are text."""
        columns = plain(self._columns(table))
        nested = [name for name, kind in SCHEMAS[table].items() if kind == "json"]
        return frame("polars", columns | {name: list(map(str, columns[name])) for name in nested})

    def figure(self, name: str = PICTURES[0]) -> Figure:
        """`latency_cdf`, `itl_over_time`, `batch_composition` or `occupancy`."""
        from schedlab.experiments.analysis import plots

        if name not in PICTURES:
            raise ConfigError(f"figure {name!r}: expected one of {', '.join(PICTURES)}")
        several = name in PICTURES[:2]
        return visible(getattr(plots, name)({"": self} if several else self))

    def _columns(self, table: str) -> Columns:
        if table not in SCHEMAS:
            raise ConfigError(f"table {table!r}: expected one of {', '.join(SCHEMAS)}")
        columns: Columns = getattr(self, table)
        return columns


def in_order(columns: Columns, by: str) -> Columns:
    """Rows by a column; those that are equal in it stay as they are."""
    order = np.argsort(columns[by], kind="stable")
    return {
        name: values[order] if isinstance(values, np.ndarray) else [values[i] for i in order.tolist()]
        for name, values in columns.items()
    }


def plain(columns: Columns) -> dict[str, list[Any]]:
    return {name: values.tolist() if isinstance(values, np.ndarray) else values for name, values in columns.items()}


class Runs(Shown):
    """Finished and failed runs in and below a directory, by number or by the name that tells each from the others."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.comparison = Comparison.read([self.directory], required=True)

    @property
    def names(self) -> list[str]:
        return self.comparison.names

    @property
    def failed(self) -> dict[str, str | None]:
        """Why, by name."""
        return {name: run.error for name, run in self.comparison.failed.items()}

    def __len__(self) -> int:
        return len(self.comparison.runs)

    def __getitem__(self, which: int | str) -> RunResult:
        place = self.names.index(which) if isinstance(which, str) and which in self.names else which
        if isinstance(place, str):
            raise ConfigError(f"{place!r}: no such run; there are {', '.join(self.names)}")
        run: Run = self.comparison.runs[place]
        return RunResult.of(run.tables, run.directory)

    def __iter__(self) -> Iterator[RunResult]:
        return (self[place] for place in range(len(self)))

    def rows(self) -> list[Row]:
        """A row a run: what it was asked, and its whole summary."""
        header, rows = self.comparison.wide()
        return [dict(zip(header, row, strict=True)) for row in rows]

    def table(self) -> list[Row]:
        known = {key: None for run in self.comparison.runs for key, value in run.figures.items() if value is not None}
        figures = headlines(list(known))
        named = zip(self.names, self.comparison.runs, strict=True)
        return [{"run": name, **{f.heading: f.write(run.figures.get(f.key)) for f in figures}} for name, run in named]

    def compare(self, **options: Any) -> Compared:
        """As `schedlab.compare` of this directory."""
        from schedlab.experiments.notebook.studies import compare

        return compare(self.directory, **options)

    def plot(self, x: str | None = None, y: str = "ttft/p99", pareto: bool = False) -> Plotted:
        """As `schedlab.plot` of this directory."""
        from schedlab.experiments.notebook.studies import plot

        return plot(self.directory, x=x, y=y, pareto=pareto)

    def picture(self) -> Figure:
        """The 99th percentile of TTFT against the number that was swept."""
        return self.plot().picture()


def load(directory: str | Path) -> RunResult | Runs:
    """The run in `directory`, or the runs below it. ConfigError where there is none."""
    path = Path(directory)
    return RunResult.of(read_run(path), path) if (path / "result.json").exists() else Runs(path)


# ---- one run ----


def run(
    policy: Any = "fcfs",
    workload: Any = "sample",
    engine: Any = "cpu",
    *words: str,
    seed: int = 0,
    slo: Any = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    **more: Any,
) -> RunResult:
    """One run; each of its parts is an object, or a name as on the command line.

    `engine` is a name, or comes from `schedlab.engines`, as in `engines.virtual("llama3.1-8b", "h100")`. `words` are
    the command line's, `"policy.chunk_size=256"`; `more` are its keys with two underscores for a dot,
    `policy__chunk_size=256`. Where all parts are objects, `more` are fields of `Experiment`. With `out`, a run
    directory is written there. `progress` left out: shown in a notebook.
    """
    parts = {"policy": policy, "workload": workload, "engine": engine}
    made = of_objects(parts, seed, slo, words, more) or named(parts, seed, slo, words, more)
    shown = progress_of(made.name, progress)
    if out is None:
        return RunResult.of(made.run(progress=shown))
    tables = made.run(Path(out), shown)
    return RunResult.of(replace(tables, manifest=read_run(out).manifest), Path(out))


def of_objects(
    parts: Mapping[str, Any], seed: int, slo: Any, words: Sequence[str], more: Mapping[str, Any]
) -> Experiment | None:
    """Without Hydra, where nothing is asked of it."""
    names = any(isinstance(part, str) for part in (*parts.values(), slo))
    if names or words or more.keys() - {f.name for f in fields(Experiment)}:
        return None
    return Experiment(**parts, seed=seed, slo=slo, **more)


def named(parts: Mapping[str, Any], seed: int, slo: Any, words: Sequence[str], more: Mapping[str, Any]) -> Experiment:
    from schedlab.experiments.notebook.words import PARTS, experiment

    parts = {**parts, "slo": slo, **{place: more[place] for place in PARTS if place in more}}
    return experiment(parts, words, {"seed": seed, **{key: value for key, value in more.items() if key not in PARTS}})


# ---- many runs ----


def sweep(
    policy: Any = "fcfs",
    workload: Any = "sample",
    engine: Any = "cpu",
    *words: str,
    out: str | Path | None = None,
    n_jobs: int = -1,
    progress: bool | None = None,
    **more: Any,
) -> Runs:
    """Every combination of the values that are given as lists, tuples or ranges: `policy=["fcfs", Mine()]`,
    `seed=range(8)`; a value that is a list itself stands in one of its own, `workload__window=[[0, 60]]`.

    Arguments are those of `run`. The runs are directories of `out`, by number, beside their comparison; it must be
    empty, and is a new one below `multirun` where it is left out. `n_jobs` processes run them, -1 for as many as there
    are processors; 1 is this one. A run that fails costs the others nothing.
    """
    folder = empty(Path(out) if out is not None else Path("multirun", f"{datetime.now():%Y-%m-%d/%H-%M-%S-%f}"))
    keys = {"policy": policy, "workload": workload, "engine": engine, **more}
    axes = {key: list(value) if isinstance(value, list | tuple | range) else [value] for key, value in keys.items()}
    if empties := [key for key, values in axes.items() if not values]:
        raise ConfigError(f"sweep: expected values of {empties[0]}, found none")
    check(axes, words)
    jobs = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    folders = [folder / str(number) for number in range(len(jobs))]
    payloads = [packed(place, job, words) for place, job in zip(folders, jobs, strict=True)]
    execute_all(folders, payloads, n_jobs, progress)
    runs = Runs(folder)
    runs.comparison.write(folder)
    return runs


def empty(folder: Path) -> Path:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: expected an empty folder for a sweep, or none; schedlab.load reads finished runs")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check(axes: Mapping[str, Sequence[Any]], words: Sequence[str]) -> None:
    """ConfigError for a value that names nothing, before anything runs: each once, beside the first of the others."""
    first = {key: values[0] for key, values in axes.items()}
    others = [{**first, key: value} for key, values in axes.items() if key != "seed" for value in values[1:]]
    for keys in (first, *others):
        from_keys(keys, words)


def from_keys(keys: Mapping[str, Any], words: Sequence[str]) -> Experiment:
    rest = {key: value for key, value in keys.items() if key not in ("policy", "workload", "engine", "seed", "slo")}
    parts = {key: keys[key] for key in ("policy", "workload", "engine")}
    asked = parts, keys.get("seed", 0), keys.get("slo"), words, rest
    made = of_objects(*asked) or named(*asked)
    made.labels = {**made.labels, **{place: told(part) for place, part in parts.items() if not isinstance(part, str)}}
    return made


def told(part: Any) -> str:
    """The class of an object with the knobs that are not as they come, or its own name."""
    if not hasattr(part, "schedule"):
        return str(getattr(part, "name", type(part).__name__))
    knobs = fields(part) if is_dataclass(part) else ()
    changed = {f.name: value for f in knobs if (value := getattr(part, f.name)) != f.default}
    shown = [f"{name}={value}" for name, value in changed.items() if isinstance(value, int | float | str)]
    return type(part).__name__ + (f"({', '.join(shown)})" if shown else "")


def packed(folder: Path, keys: Mapping[str, Any], words: Sequence[str]) -> Payload:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps((folder, dict(keys), tuple(words))))
    except Exception as error:  # whatever an object's own way of being copied raises
        raise ConfigError(f"sweep: an object cannot go to another process: {error}") from error


def execute(payload: Payload) -> None:
    """One job, in whichever process. A failure is its result."""
    import cloudpickle

    from schedlab.experiments.run.compose import flat
    from schedlab.experiments.run.job import record_failure

    folder, keys, words = cloudpickle.loads(payload)
    try:
        from_keys(keys, words).run(folder)
    except Exception as error:
        record_failure(folder, error)
        print(f"{folder.name}: failed: {flat(error)}", file=sys.stderr)


def execute_all(folders: Sequence[Path], payloads: Sequence[Payload], n_jobs: int, wanted: bool | None) -> None:
    from schedlab.experiments.sweep.pool import processes_for, run_all

    processes, ended = processes_for(n_jobs, "n_jobs"), counting("sweep", len(payloads), wanted)
    if processes == 1:
        for done, payload in enumerate(payloads, start=1):
            execute(payload)
            ended(done)
        return
    with without_main():
        outcomes = run_all(partial(partial, execute), payloads, processes)
        for done, (number, outcome) in enumerate(outcomes, start=1):
            if outcome.error is not None:
                note_lost(folders[number], outcome.error)
            ended(done)


def note_lost(folder: Path, error: Exception) -> None:
    """Nothing in a process that ended could say so: leave it in the job's result, beside what the run had written."""
    from schedlab.experiments.run.job import record_failure

    if not (folder / "result.json").exists():
        record_failure(folder, error)
    else:
        write_json(folder / "result.json", {**read_run(folder).result, "error": str(error)})


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that start meanwhile do not run the caller's script again: what they need travels by value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
