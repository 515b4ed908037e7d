"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from html import escape
from types import TracebackType
from typing import IO, Any, Protocol, Self

LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.1


class Counts(Protocol):
    """Requests that came to an end, of how many."""

    done: int
    total: int


class Quiet:
    """Shows nothing."""

    shows = False

    def begin(self, offered: str) -> None:
        """The run starts; `offered` says what it is offered."""

    def update(self, counts: Counts, now_ns: int, waiting: int, running: int) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        pass


class ProgressLines(Quiet):
    """A line every ten seconds."""

    shows = True

    def __init__(self, title: str, stream: IO[str]) -> None:
        self._title = title
        self._stream = stream
        self._next = time.monotonic() + LINE_EVERY_S

    def begin(self, offered: str) -> None:
        print(f"{self._title}: {offered}", file=self._stream, flush=True)

    def update(self, counts: Counts, now_ns: int, waiting: int, running: int) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + LINE_EVERY_S
        print(f"{self._title}: {status(counts, now_ns, waiting, running)}", file=self._stream, flush=True)


class Bar(Quiet):
    """A bar that is redrawn in place and leaves nothing behind."""

    shows = True

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
        )
        self._title = title
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        self._task = self._bar.add_task(title, total=None, status="")
        self._next = 0.0

    def begin(self, offered: str) -> None:
        self._bar.console.print(f"{self._title}: {offered}", highlight=False, markup=False)

    def update(self, counts: Counts, now_ns: int, waiting: int, running: int) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + REDRAW_EVERY_S
        shown: dict[str, Any] = {"completed": counts.done, "total": counts.total}
        self._bar.update(self._task, **shown, status=status(counts, now_ns, waiting, running))
        self._bar.refresh()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.stop()


class Cell(Quiet):
    """A bar in the output of a notebook's cell."""

    shows = True

    def __init__(self, title: str) -> None:
        self._title = title
        self._handle: Any = None
        self._next = 0.0

    def begin(self, offered: str) -> None:
        self.draw(0, 1, offered)

    def update(self, counts: Counts, now_ns: int, waiting: int, running: int) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + REDRAW_EVERY_S
        self.draw(counts.done, counts.total, status(counts, now_ns, waiting, running))

    def draw(self, done: int, total: int, words: str) -> None:
        from IPython.display import HTML, display

        text = escape(f"{self._title}: {words}")
        bar = HTML(f'<progress max="{total}" value="{done}"></progress> {text}')
        if self._handle is None:
            self._handle = display(bar, display_id=True)
        else:
            self._handle.update(bar)


def status(counts: Counts, now_ns: int, waiting: int, running: int) -> str:
    at = f"at {now_ns / 1e9:,.1f} s"
    return f"{counts.done:,} of {counts.total:,} requests, {running} running, {waiting} waiting, {at}"


def progress(title: str, wanted: bool = True) -> Quiet:
    """A bar where one process has a terminal to itself; lines elsewhere; nothing if not wanted."""
    if not wanted:
        return Quiet()
    if sys.stderr.isatty() and multiprocessing.parent_process() is None:
        return Bar(title)
    return ProgressLines(title, sys.stderr)


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def progress_of(title: str, wanted: bool | None) -> Quiet:
    """As `progress`; in a notebook a bar in the cell, also where nothing is said of whether it is wanted."""
    if in_notebook() and wanted is not False:
        return Cell(title)
    return progress(title, bool(wanted))


def counting(title: str, total: int, wanted: bool | None) -> Callable[[int], None]:
    """What is told how many runs have ended: a bar in a notebook, lines elsewhere if wanted."""
    shown = progress_of(title, wanted)

    def tell(done: int) -> None:
        words = f"{done:,} of {total:,} runs"
        if isinstance(shown, Cell):
            shown.draw(done, total, words)
        elif shown.shows:
            print(f"{title}: {words}", file=sys.stderr, flush=True)

    return tell
