"""Opening trace files: compression by content, text as UTF-8, every fault as one line that names the file.

A file that ends within a line, as that of a killed writer, is read up to the line above.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import IO, cast

from schedlab.framework.errors import TraceError
from schedlab.framework.results.packed import GZIP, ZSTD, Unpacked

_NO_TEXT = {
    b"version https://git-lfs.": "is a Git LFS pointer in place of the data; fetch them with git lfs pull",
    b"PK\x03\x04": "is a zip archive; unpack it and name the file inside",
    b"BZh": "is compressed by bzip2; unpack it, or pack it with gzip or zstd",
    b"\xfd7zXZ": "is compressed by xz; unpack it, or pack it with gzip or zstd",
    b"7z\xbc\xaf": "is a 7z archive; unpack it and name the file inside",
    b"PAR1": "is parquet, which format=table reads",
}
"""How files that are no text begin, and what to do about them."""
MAX_LINE = 1 << 26
"""Characters of a line, 64 Mi: rows have a few thousand, and a file without ends of line must not fill the memory."""
_cuts: ContextVar[list[str] | None] = ContextVar("cuts", default=None)


class Lines:
    """The lines of an open text, in order. Where a compressed file ends early they end with the last whole one.

    Once the last line is given, `torn` says whether the file ended within it.
    """

    def __init__(self, path: Path, text: IO[str]) -> None:
        self._path, self._text = path, text
        self.torn = False

    def __iter__(self) -> Iterator[str]:
        before: str | None = None
        try:
            for line in self._text:
                if before is not None:
                    yield before
                before = line
        except EOFError:
            note_cut(f"{self._path}: the compressed file ends early; read up to its last whole line")
        if before is not None:
            self.torn = not before.endswith(("\n", "\r"))
            yield before


@contextmanager
def collected_cuts() -> Iterator[list[str]]:
    """What `note_cut` is told in here."""
    cuts: list[str] = []
    token = _cuts.set(cuts)
    try:
        yield cuts
    finally:
        _cuts.reset(token)


def note_cut(what: str) -> None:
    """A file ends in the middle of a row and was read up to the row above; an error where nobody collects that."""
    cuts = _cuts.get()
    if cuts is None:
        raise TraceError(what)
    cuts.append(what)


class BoundedText(io.TextIOWrapper):
    """UTF-8 text of the file `path` whose lines are no longer than MAX_LINE. TraceError for a longer one."""

    def __init__(self, raw: IO[bytes], path: str | Path) -> None:
        super().__init__(raw, encoding="utf-8-sig", newline="")
        self._path = path

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        line = super().readline(MAX_LINE + 1 if size < 0 else size)
        if len(line) > MAX_LINE:
            raise TraceError(f"{self._path}: a line is longer than {MAX_LINE:,} characters; expected a row a line")
        return line

    def __next__(self) -> str:  # type: ignore[override]
        if line := self.readline():
            return line
        raise StopIteration


@contextmanager
def open_text(path: str | Path) -> Iterator[IO[str]]:
    """The text of a plain, gzip or zstd file, whatever its name; a byte order mark is skipped."""
    try:
        with _open_bytes(Path(path)) as raw, BoundedText(raw, path) as text:
            yield text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: damaged or truncated compressed file ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text: {error.reason} near byte {error.start} of a block") from error
    except IsADirectoryError as error:
        raise TraceError(f"{path}: is a directory, expected a file") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def check_regular(path: Path) -> None:
    """TraceError for a pipe or a device: traces are read more than once, and need not end there."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TraceError(
            f"{path}: is a pipe or a device, expected a file; write what comes from it into one first, or pipe it into "
            "schedlab trace info -"
        )


def _open_bytes(path: Path) -> IO[bytes]:
    check_regular(path)
    with path.open("rb") as file:
        head = file.read(32)
    if head.startswith(GZIP.magic):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if head.startswith(ZSTD.magic):
        return _open_zstd(path)
    for magic, what in _NO_TEXT.items():
        if head.startswith(magic):
            raise TraceError(f"{path}: {what}")
    return path.open("rb")


def _open_zstd(path: Path) -> IO[bytes]:
    if find_spec("zstandard") is None:
        raise TraceError(f"{path}: is zstd-compressed; install the package zstandard to read it")
    return io.BufferedReader(Unpacked(path))


def sha256(path: str | Path) -> str:
    """Of a file's bytes as they lie on disk; of a folder, over the hashes of its files in order of name."""
    if Path(path).is_dir():
        files = sorted(file for file in Path(path).iterdir() if file.is_file())
        return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()
    check_regular(Path(path))
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def at_row(path: str | Path, row: int, line: int, fault: str) -> TraceError:
    """The error for a record: its 0-based number and the 1-based line it stands on."""
    return TraceError(f"{path}: row {row} (line {line}): {fault}")


def ended_within(path: str | Path, row: int, line: int) -> str:
    return f"{path}: ends within row {row} (line {line}); read up to the row above"


def shown(value: object) -> str:
    """A value for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def listed(names: Iterable[str], limit: int = 20) -> str:
    """Names for a message: quoted, long ones and long lists cut short."""
    short = [shown(name) for name in names]
    return ", ".join(short[:limit]) + (f" and {len(short) - limit} more" if len(short) > limit else "")
