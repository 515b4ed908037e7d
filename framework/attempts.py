"""When a client that has waited long enough leaves, and why. Who tries again is the workload's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedlab.framework.request import EngineRequest

TIMED_OUT = "timed_out"
"""Reason of requests whose client left because it had waited long enough."""


def leaving_times(request: EngineRequest) -> list[int]:
    """When `request` may be withdrawn, ns, each time once."""
    tried = request.tried
    patience = () if tried is None else (tried.first_token_by_ns, tried.end_by_ns)
    return sorted({ns for ns in (request.abort_ns, *patience) if ns is not None})


def leaves(request: EngineRequest, due_ns: int) -> bool:
    """Whether `request`, which has not ended, is withdrawn at `due_ns`, one of its leaving times."""
    tried = request.tried
    if tried is None or due_ns in (request.abort_ns, tried.end_by_ns):
        return True
    first = request.first_token_ns
    return first is None or first + request.delivery_ns > due_ns


def why_it_leaves(request: EngineRequest, due_ns: int) -> str | None:
    """The reason that its row gives; None where the workload itself withdraws it."""
    return None if due_ns == request.abort_ns else TIMED_OUT
