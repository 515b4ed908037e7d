"""The compiled kernels of native.cpp: where the library for this processor lies, how it is built, and how it is loaded.

It is an extra: nothing is compiled unless `build` is called, and without it `torch_backend` serves the CPU. g++ or
another compiler of GCC's vectors is needed to build, nothing to run. Parallel regions use the OpenMP that torch brings,
so that one set of threads serves both.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
HEADERS = ("native_vectors.h", "native_products.h", "native_attention.h")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp")


class BuildError(RuntimeError):
    """The compiler is missing or refused; the message says which."""


def directory() -> Path:
    """The user's cache: `$XDG_CACHE_HOME/schedlab/native`, or `~/.cache/schedlab/native`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "schedlab" / "native"


def path() -> Path:
    """Where the library for these sources and this processor lies, or would lie."""
    digest = hashlib.blake2b(digest_size=8)
    sources = [SOURCE.with_name(name).read_bytes() for name in (SOURCE.name, *HEADERS)]
    for part in (*sources, " ".join(FLAGS).encode(), _processor().encode()):
        digest.update(part)
    return directory() / f"schedlab-{digest.hexdigest()}.so"


def built() -> bool:
    return path().exists()


def build(compiler: str | None = None) -> Path:
    """Compile the library, in seconds, unless it is there. Raises BuildError. `compiler`: default $CXX, or g++."""
    target = path()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    compiler = compiler or os.environ.get("CXX") or "g++"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, library = Path(folder) / "native.o", Path(folder) / "native.so"
        _run([compiler, *FLAGS, "-c", str(SOURCE), "-o", str(made)])
        _run([compiler, "-shared", str(made), "-o", str(library)])  # OpenMP's symbols are torch's, found when loaded
        library.replace(target)
    return target


@cache
def load() -> ctypes.CDLL:
    """The library with its functions' types declared. Raises BuildError if it is not built or cannot be loaded."""
    import torch  # noqa: F401 (brings OpenMP)

    if not built():
        raise BuildError(f"no compiled kernels for this processor in {directory()}")
    try:
        library = ctypes.CDLL(str(path()))
    except OSError as error:
        raise BuildError(f"{path()}: {error}") from None
    for name, types in _SIGNATURES.items():
        function = getattr(library, f"schedlab_{name}")
        function.argtypes = [_TYPES[letter] for letter in types]
        function.restype = ctypes.c_int if name == "panel" else None
    return library


_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
_SIGNATURES = {
    "panel": "",
    "linear_float": "pllllpppi",
    "linear_bf16": "pllllpppi",
    "linear_int8": "pllllppippi",
    "linear_int4": "pllllpppippi",
    "attention": "pppiplpppllllllfi",
    "rope_kv_write": "ppplllpppppiplllll",
    "rms_norm": "pppfppll",
    "silu_mul": "ppll",
}


def _processor() -> str:
    """What the compiler may use of this processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: expected a C++ compiler, found: {error.strerror}") from None
    if done.returncode:
        first = next(iter(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
        raise BuildError(f"{' '.join(command[:3])} …: {first}")
