"""`schedlab kernels build`: the compiled CPU kernels in the user's cache. How they are compiled is kernels' own."""

from __future__ import annotations

from pathlib import Path

from schedlab.framework.errors import ConfigError


def build() -> Path:
    """Compile, unless that is done, and load what was compiled. ConfigError of one line if either fails."""
    from schedlab.kernels import native_library

    try:
        path = native_library.build()
        native_library.load()
    except native_library.BuildError as error:
        raise ConfigError(f"kernels build: {error}") from None
    return path
