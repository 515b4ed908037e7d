"""Independent named random streams: a name and a seed give the same draws whatever else is drawn."""

from __future__ import annotations

import numpy as np

from schedlab.framework.content import digest


def stream(seed: int, *names: str) -> np.random.Generator:
    """The generator of this name, e.g. `stream(0, "client-3", "arrivals")`."""
    key = digest(b"stream", b"%d" % seed, *(name.encode() for name in names))
    return np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
