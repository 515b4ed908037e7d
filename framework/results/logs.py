"""JSON lines in compressed files, written as a run goes and readable up to the last flush."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path

from schedlab.framework.errors import ConfigError
from schedlab.framework.results import packed

PARTIAL = ".partial"
MAX_LINE = 1 << 28
"""Bytes of a row: that of a step names every request of its batch."""


def log_path(directory: Path, table: str) -> Path:
    """The log of a table; where it would be if there is none."""
    return packed.find(directory, f"{table}.jsonl")


def partial_path(directory: Path, table: str) -> Path:
    """Where a log grows until it is whole."""
    partial = [path.with_name(path.name + PARTIAL) for path in packed.paths(directory, f"{table}.jsonl")]
    return next((path for path in partial if path.is_file()), partial[-1])


def all_paths(directory: Path, table: str) -> list[Path]:
    """All that a run may have left of a table's log."""
    whole = packed.paths(directory, f"{table}.jsonl")
    return whole + [path.with_name(path.name + PARTIAL) for path in whole]


class Log:
    """A text file compressed as it grows, under a `.partial` name until it is whole.

    Compressing needs no interpreter, so `thread`, which has one worker, does it beside the run. What goes wrong there
    (a full disk) is raised by the next call.
    """

    def __init__(self, directory: Path, table: str, thread: Executor) -> None:
        self._path = directory / f"{table}.jsonl{packed.codec().suffix}"
        self._partial = self._path.with_name(self._path.name + PARTIAL)
        self._text = packed.PackedText(self._partial, packed.codec())
        self._thread = thread
        self._pending: list[Future[None]] = []

    def write(self, text: str) -> None:
        self.settle()  # at most one piece is on its way
        self._pending.append(self._thread.submit(self._text.write, text))

    def sync(self) -> None:
        """Make everything written so far readable, soon."""
        self._pending.append(self._thread.submit(self._text.sync))

    def settle(self) -> None:
        """Wait until what was passed on before is on disk."""
        while self._pending:
            self._pending.pop(0).result()

    def close(self, *, whole: bool) -> None:
        """End the stream; a whole log gets its final name. Closed twice, it stays as it was after the first time."""
        if self._text.closed:
            return
        try:
            self.settle()
        finally:
            self._text.close()
        if whole:
            self._partial.replace(self._path)


def log_lines(path: Path, *, whole: bool) -> Iterator[list[str]]:
    """Complete lines of a log, in batches; a torn end is an error if the log should be whole."""
    rest, torn = b"", False
    try:
        for piece in packed.unpacked(path):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > MAX_LINE:
                raise ConfigError(f"{path}: a line is longer than {MAX_LINE:,} bytes; the file is damaged")
            yield [line.decode() for line in lines]
    except EOFError:
        torn = True
    if whole and (torn or rest):
        raise ConfigError(f"{path}: the log of a finished run ends early; the file is damaged")
