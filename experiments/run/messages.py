"""What commands say in passing: paths and warnings on one line, and failures that cost nothing but a picture."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def short(directory: Path) -> str:
    """A path as short as it can be given to a command."""
    return min(str(directory), os.path.relpath(directory), key=len)


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Warnings as one line, without the source line that raised them."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


@contextmanager
def drawing(directory: Path) -> Iterator[None]:
    """Pictures are drawn from the files: no run is lost for want of one."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"no plots in {short(directory)}: {type(error).__name__}: {error}", stacklevel=3)
