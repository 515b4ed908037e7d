"""How short capacity was in a run, from its result, or for one that was recorded without from its logs."""

from __future__ import annotations

from schedlab.experiments.analysis.series import measured_rows
from schedlab.framework.results.pressure import Pressure
from schedlab.framework.results.tables import RunTables


def pressure(tables: RunTables) -> dict[str, float | int | None]:
    """`pressure/queue` and `pressure/split_prompts`; empty for a run that has neither result nor logs of it."""
    told = tables.result.get("pressure")
    if told is None:
        if tables.result["record"] != "full":
            return {}
        counted = Pressure()
        counted.add(tables.steps)
        told = counted.told(measured_rows(tables.requests))
    return {f"pressure/{name}": value for name, value in told.items()}
