"""What the summary needs of every request, gathered from their rows as they end: 91 bytes a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO
from schedlab.framework.results.metrics import MEASURED, MEASURED_FROM, STATUSES, UNKNOWN
from schedlab.framework.results.tables import REQUESTS, RawColumns, integers


class MeasuredRequests:
    """`slos` are the classes met so far, by name; `clients`, the names that index the column of that name."""

    def __init__(self, default: SLO | None) -> None:
        self.slos: dict[str, SLO] = {}
        self._default = default
        self._clients: dict[str, int] = {}
        self._parts: list[np.ndarray] = []

    @property
    def clients(self) -> list[str]:
        return list(self._clients)

    def slo_names(self, slos: Sequence[SLO | None]) -> list[str | None]:
        """Names of the classes; requests without one are judged by the default, if there is one."""
        judged = [self._default if slo is None else slo for slo in slos]
        for slo in judged:
            if slo is not None and self.slos.setdefault(slo.name, slo) is not slo and self.slos[slo.name] != slo:
                raise ConfigError(f"two SLO classes are named {slo.name}: {self.slos[slo.name]} and {slo}")
        return [None if slo is None else slo.name for slo in judged]

    def add(self, raw: RawColumns, demanded: Sequence[int]) -> None:
        """Request rows whose times are in nanoseconds, and the tokens that each asked for."""
        codes: dict[str | None, int] = {name: i for i, name in enumerate(self.slos)}
        clients = self._clients
        out = np.empty(len(demanded), dtype=MEASURED)
        out["status"] = [STATUSES.index(status) for status in raw["status"]]
        out["client"] = [clients.setdefault(client, len(clients)) for client in raw["client"]]
        out["slo"] = [codes.get(name, UNKNOWN) for name in raw["slo"]]
        out["demanded_tokens"] = integers(demanded)
        for column, name in MEASURED_FROM.items():
            values = raw[name]
            nullable = REQUESTS[name].endswith("?")
            out[column] = integers([UNKNOWN if v is None else v for v in values] if nullable else values)
        self._parts.append(out)

    def whole(self) -> np.ndarray:
        """MEASURED [N] of all of them, in the order in which they ended."""
        if len(self._parts) != 1:
            whole = np.empty(sum(map(len, self._parts)), dtype=MEASURED)
            at = len(whole)
            while self._parts:  # a part is given back as soon as it is copied: never is all of it there twice
                part = self._parts.pop()
                at -= len(part)
                whole[at : at + len(part)] = part
            self._parts = [whole]
        return self._parts[0]
