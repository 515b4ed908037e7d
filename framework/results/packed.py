"""Text that is compressed as it grows: by zstd where the package zstandard is there, else by gzip. Both are read.

What was written before a `sync` can be read however the writer ends.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from schedlab.framework.errors import ConfigError

_GZIP_FORMAT = 16 + zlib.MAX_WBITS
_CHUNK = 1 << 18


class Codec(NamedTuple):
    """A compression: its files end in `suffix` and begin with `magic`; `sync` and `finish` are its ways to flush."""

    name: str
    suffix: str
    magic: bytes
    compressor: Callable[[], Any]
    decompressor: Callable[[], Any]
    sync: int
    finish: int


def _zstd(kind: str) -> Callable[[], Any]:
    def begin() -> Any:
        import zstandard

        level = {"level": 1} if kind == "ZstdCompressor" else {}
        made: Any = getattr(zstandard, kind)(**level)
        return made.compressobj() if level else made.decompressobj()

    return begin


GZIP = Codec(
    "gzip", ".gz", b"\x1f\x8b",
    lambda: zlib.compressobj(1, zlib.DEFLATED, _GZIP_FORMAT), lambda: zlib.decompressobj(_GZIP_FORMAT),
    zlib.Z_SYNC_FLUSH, zlib.Z_FINISH,
)  # fmt: skip
ZSTD = Codec("zstd", ".zst", b"\x28\xb5\x2f\xfd", _zstd("ZstdCompressor"), _zstd("ZstdDecompressor"), 1, 0)
CODECS = (ZSTD, GZIP)


@cache
def codec() -> Codec:
    """That of new files."""
    return ZSTD if find_spec("zstandard") else GZIP


def paths(directory: Path, name: str) -> list[Path]:
    """Where the file called `name` may be, whoever compressed it."""
    return [directory / f"{name}{codec.suffix}" for codec in CODECS]


def find(directory: Path, name: str) -> Path:
    """The file called `name` as it was compressed; where it would be if there is none. ConfigError if there are two."""
    found = [path for path in paths(directory, name) if path.is_file()]
    if len(found) > 1:
        raise ConfigError(f"{directory}: expected one of {' and '.join(path.name for path in found)}, found both")
    return found[0] if found else directory / f"{name}{codec().suffix}"


class PackedText:
    """A file to write; compressed by what its name says, or by `codec`."""

    def __init__(self, path: Path, codec: Codec | None = None) -> None:
        self._codec = codec or next((codec for codec in CODECS if path.suffix == codec.suffix), GZIP)
        self._stream = self._codec.compressor()
        self._file = path.open("wb")

    def write(self, text: str) -> None:
        self._file.write(self._stream.compress(text.encode()))

    def sync(self) -> None:
        """Make everything written so far readable."""
        self._file.write(self._stream.flush(self._codec.sync))
        self._file.flush()

    def close(self) -> None:
        """End the stream, once."""
        if not self._file.closed:
            with self._file:
                self._file.write(self._stream.flush(self._codec.finish))

    @property
    def closed(self) -> bool:
        return self._file.closed


def unpacked(path: Path) -> Iterator[bytes]:
    """The content of a compressed file, in pieces; EOFError behind the last one that can be had if it ends early."""
    stream, whole = None, False
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            while data:
                stream = stream or _decompressor(path, data)
                try:
                    piece = stream.decompress(data)
                except Exception as error:  # of whichever library
                    raise EOFError(f"damaged: {error}") from error
                yield piece
                whole, data = stream.eof, stream.unused_data
                stream = None if whole else stream
    if not whole:
        raise EOFError("ends early")


def _decompressor(path: Path, head: bytes) -> Any:
    codec = next((codec for codec in CODECS if head.startswith(codec.magic[: len(head)])), None)
    if codec is None:
        raise EOFError("damaged: neither gzip nor zstd")
    try:
        return codec.decompressor()
    except ImportError as error:
        raise ConfigError(f"{path}: is zstd-compressed; install the package zstandard to read it") from error


class Unpacked(io.RawIOBase):
    """`unpacked` as a file to read."""

    def __init__(self, path: Path) -> None:
        self._pieces = unpacked(path)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def opened(path: Path) -> IO[str]:
    """Its text; whoever reads it gets an EOFError where it ends early."""
    return io.TextIOWrapper(io.BufferedReader(Unpacked(path)), encoding="utf-8")
