"""`schedlab trace info | convert | synthesize`: what is in a trace, and traces from other formats or from a workload.

Reading, statistics and writing are in workloads/.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from schedlab.experiments.run import compose
from schedlab.framework.errors import ConfigError, TraceError
from schedlab.framework.request import NS
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers import read
from schedlab.workloads.select import first_requests, limit_length, scale_time
from schedlab.workloads.statistics import (
    ArrivalStatistics,
    Distribution,
    arrival_statistics,
    oddities,
    reuse,
    reuse_with_memory,
    session_lengths,
)
from schedlab.workloads.trace import Trace
from schedlab.workloads.workload import Offered
from schedlab.workloads.writers import write_mooncake, write_offered, write_vidur

WRITERS: dict[str, Callable[[Trace, Path], None]] = {
    "mooncake": write_mooncake,
    "vidur": write_vidur,
    "offered": write_offered,
}


def info(
    path: str | Path, format: str | None = None, *, num_blocks: int | None = None, block_size: int = 16,
    plot: str | Path | None = None, options: ReadOptions | None = None, console: Console | None = None,
) -> None:  # fmt: skip
    """Print one screen on a trace file or run directory; failed and empty rows are counted in.

    `num_blocks` of `block_size` tokens: the memory at which reuse is told beside the unlimited one. `plot`: a PNG with
    the arrivals over time and the lengths.
    """
    options = options or ReadOptions(keep_failed=True, keep_empty=True)
    with on_disk(path) as file:
        trace = read(file, format, options)
    show = (console or Console(highlight=False)).print
    show(f"[bold]{path}[/bold]")
    show(f"format {trace.provenance.format}, origin {trace.provenance.origin}, sha256 {trace.provenance.sha256}")
    for statement in trace.provenance.assumed:
        show(f"assumed: {statement}")
    show(figures(trace))
    show(lengths(trace))
    for line in [*sessions(trace), *reusable(trace, num_blocks, block_size), *odd_rows(trace)]:
        show(line)
    if plot is not None:
        save_plot(trace, Path(plot))
        show(f"plot: {plot}")


@contextmanager
def on_disk(path: str | Path) -> Iterator[Path]:
    """The file at `path`; for `-` one that holds what comes from standard input, for traces are read more than once."""
    if str(path) != "-":
        yield Path(path)
        return
    with TemporaryDirectory(prefix="schedlab-") as folder:
        file = Path(folder) / "standard input"
        try:
            with file.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
        except OSError as error:
            raise TraceError(f"standard input: {error.strerror}, at {file}") from error
        yield file


def column_names(words: Iterable[str]) -> dict[str, str]:
    """`ours=theirs` words as the columns of a table."""
    pairs = [word.partition("=") for word in words]
    if wrong := next((ours for ours, equals, theirs in pairs if not (ours and equals and theirs)), None):
        raise ConfigError(f"--columns {wrong}: expected ours=theirs, as in --columns arrival=ts")
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def figures(trace: Trace) -> Table:
    arrivals = arrival_statistics(trace)
    table = Table("requests", "span s", "rate/s", "gap CV", "var/mean per s", "longest gap s", "stamps", "most on one")
    table.add_row(f"{len(trace):,}", f"{arrivals.span_s:,.0f}", *_arrival_cells(arrivals))
    return table


def _arrival_cells(arrivals: ArrivalStatistics) -> list[str]:
    """Three significant digits as a rule; unknown stays unknown."""
    shown = [arrivals.rate, arrivals.gap_cv, arrivals.dispersion, arrivals.longest_gap_s]
    cells = ["unknown" if value is None else rounded(value) for value in shown]
    return [*cells, f"{arrivals.distinct:,}", f"{arrivals.most:,}"]


def rounded(value: float) -> str:
    """Two decimals; below 0.1 three decimals."""
    return f"{value:,.3f}" if abs(value) < 0.1 else f"{value:,.2f}"


def lengths(trace: Trace) -> Table:
    """Prompt and output tokens, of all requests and of each kind where the file tells kinds apart."""
    table = Table("tokens", "requests", "mean", "median", "p99", "max")
    groups = [("", np.ones(len(trace), dtype=bool))]
    if trace.kind is not None and len(trace.kind.names) > 1:
        groups += [(f" of {name!r}", trace.kind.codes == code) for code, name in enumerate(trace.kind.names)]
    for name, rows in groups:
        for label, column in (("prompt", trace.prompt_tokens), ("output", trace.output_tokens)):
            d = Distribution.of(column[rows])
            table.add_row(label + name, f"{rows.sum():,}", *(f"{v:,.0f}" for v in (d.mean, d.median, d.p99, d.max)))
    return table


def sessions(trace: Trace) -> list[str]:
    turns = session_lengths(trace)
    if not len(turns):
        return ["sessions: none recorded"]
    tied = 0 if trace.after is None else int((trace.after >= 0).sum())
    return [
        f"sessions: {len(turns):,}, {int((turns == 1).sum()):,} of one turn, longest {turns.max():,} turns; "
        f"{tied:,} turns have a think time, {int((turns - 1).sum()) - min(tied, int((turns - 1).sum())):,} have none"
    ]


def reusable(trace: Trace, num_blocks: int | None, block_size: int) -> list[str]:
    """Reuse in percent of the prompt tokens; unknown where the trace has no block ids."""
    found = reuse(trace)
    if found is None:
        return ["prefix reuse: unknown, the trace has no block ids"]
    lines = [
        f"prefix reuse at unlimited memory: {found.prefix:.1%} of prompt tokens; {found.unique_blocks:,} different "
        f"blocks, {found.fully_cached:,} prompts wholly seen before"
    ]
    if found.any_position > found.prefix + 5e-4:
        lines.append(
            f"  of the tokens under ids: leading run of ids seen before {found.leading:.1%}, at any place "
            f"{found.any_position:.1%}"
        )
    if num_blocks is not None:
        share = reuse_with_memory(trace, num_blocks * block_size)
        lines.append(f"prefix reuse with {num_blocks:,} blocks of {block_size} tokens: {share:.1%} of prompt tokens")
    return lines


def odd_rows(trace: Trace) -> list[str]:
    counted = {name.replace("_", " "): number for name, number in trace.provenance.counts.items()}
    odd = {**counted, **{f"rows {kind}": number for kind, number in oddities(trace).items()}}
    return [f"{number:,} {name}" for name, number in odd.items()]


def convert(
    path: str | Path, out: str | Path, to: str = "mooncake", format: str | None = None, *,
    options: ReadOptions | None = None, max_requests: int | None = None, time_scale: float = 1.0,
    max_length: int | None = None, too_long: str = "error", console: Console | None = None,
) -> None:  # fmt: skip
    """Write a trace file, or the offered workload of a run directory, as `mooncake`, `vidur` or `offered`.

    What the target cannot say is an error or is told: nothing is left out silently.
    """
    with on_disk(path) as file:
        trace = read(file, format, options or ReadOptions())
    if max_requests is not None:
        trace = first_requests(trace, max_requests)
    if max_length is not None:
        trace = limit_length(trace, max_length, too_long)
    write(scale_time(trace, time_scale), Path(out), to, console)


def synthesize(
    out: str | Path, overrides: Sequence[str] = (), seed: int = 0, to: str = "mooncake", *,
    console: Console | None = None,
) -> None:  # fmt: skip
    """Write the requests of a configured workload, e.g. `workload=poisson workload.arrivals.rate=4`."""
    chosen = any(word.startswith("workload=") for word in overrides)
    config = compose.compose([*([] if chosen else ["workload=poisson"]), *overrides])
    workload = compose.build(config.workload, "workload")
    if not isinstance(workload, Offered):
        raise ConfigError(f"workload {type(workload).__name__} cannot be written as a trace")
    write(workload.load(seed), Path(out), to, console)


def write(trace: Trace, out: Path, to: str, console: Console | None = None) -> None:
    if to not in WRITERS:
        raise ConfigError(f"to={to}, expected one of {', '.join(WRITERS)}")
    WRITERS[to](trace, out)
    show = (console or Console(highlight=False)).print
    show(f"{out}: {len(trace):,} requests, {to}")
    for name, number in trace.provenance.counts.items():
        show(f"  {number:,} {name.replace('_', ' ')}")
    for left_out in unsaid(trace, to):
        show(f"  not in this format: {left_out}")


def unsaid(trace: Trace, to: str) -> list[str]:
    """Columns of the trace that a format has no place for."""
    if to == "offered":
        return []
    kept = {"source_row", "arrival_ns", "prompt_tokens", "output_tokens"}
    if to == "mooncake":
        kept |= {"ids", "scope", "session", "think_ns", "after", "also_after", "program", "depth", "turn", "stamped"}
    return [name for name, _ in trace.columns() if name not in kept]


def save_plot(trace: Trace, path: Path) -> None:
    """Arrivals over time beside the cumulative shares of both lengths."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    bins = min(400, max(10, len(trace) // 20))
    counts, edges = np.histogram(trace.arrival_ns / NS, bins)
    left.stairs(counts / np.maximum(np.diff(edges), 1e-9), edges, color="#0072B2")
    left.set(xlabel="time (s)", ylabel="arrivals per second", ylim=(0, None))
    columns = {"prompt": trace.prompt_tokens, "output": trace.output_tokens}
    for (label, column), colour in zip(columns.items(), ("#0072B2", "#E69F00"), strict=True):
        values = np.sort(column)
        right.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=label, color=colour)
    right.set(xlabel="tokens", ylabel="share of requests", xscale="symlog", ylim=(0, 1.02))
    right.legend()
    figure.savefig(path, dpi=120)
