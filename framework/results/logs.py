"""JSON lines in gzip files, written as a run goes and readable up to the last flush. Knows no row's meaning."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path

from schedlab.framework.errors import ConfigError

_GZIP = 16 + zlib.MAX_WBITS
"""What makes zlib read and write the gzip format."""
_CHUNK = 1 << 18


def log_path(directory: Path, table: str) -> Path:
    return directory / f"{table}.jsonl.gz"


def partial_path(directory: Path, table: str) -> Path:
    """Where a log grows until it is whole."""
    return directory / f"{table}.jsonl.gz.partial"


class GzipLog:
    """A text file compressed as it grows, under a `.partial` name until it is whole.

    Compressing is a tenth of a virtual run's work and needs no interpreter, so `thread`, which has one worker, does it
    beside the run. What goes wrong there (a full disk) is raised by the next call.
    """

    def __init__(self, directory: Path, table: str, thread: Executor) -> None:
        self._path = log_path(directory, table)
        self._partial = partial_path(directory, table)
        self._file = self._partial.open("wb")
        self._stream = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
        self._thread = thread
        self._pending: list[Future[None]] = []

    def write(self, text: str) -> None:
        self.settle()  # at most one piece is on its way
        self._pending.append(self._thread.submit(self._compress, text))

    def sync(self) -> None:
        """Make everything written so far readable, soon."""
        self._pending.append(self._thread.submit(self._flush))

    def settle(self) -> None:
        """Wait until what was passed on before is on disk."""
        while self._pending:
            self._pending.pop(0).result()

    def close(self, *, whole: bool) -> None:
        """End the stream; a whole log gets its final name. Closed twice, it stays as it was after the first time."""
        if self._file.closed:
            return
        with self._file:
            self.settle()
            self._file.write(self._stream.flush())
        if whole:
            self._partial.replace(self._path)

    def _compress(self, text: str) -> None:
        self._file.write(self._stream.compress(text.encode()))

    def _flush(self) -> None:
        self._file.write(self._stream.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()


def log_lines(path: Path, *, whole: bool) -> Iterator[list[str]]:
    """Complete lines of a gzip log, in batches; a torn end is an error if the log should be whole."""
    stream = zlib.decompressobj(_GZIP)
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            try:
                *lines, rest = (rest + stream.decompress(chunk)).split(b"\n")
            except zlib.error:
                break
            yield [line.decode() for line in lines]
    if whole and not (stream.eof and not rest):
        raise ConfigError(f"{path}: the log of a finished run ends early; the file is damaged")
