"""What must hold of any trace before it is offered: each request has a name of its own, and what a turn continues can
be continued by it alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedlab.framework.errors import TraceError
from schedlab.workloads.files import shown
from schedlab.workloads.trace import Trace


def check(trace: Trace, rows: np.ndarray | None = None) -> None:
    """Raises TraceError that names the two rows at fault; `rows` are their numbers where not `source_row`."""
    rows = trace.source_row if rows is None else rows
    if trace.request_id is not None:
        _check_names(trace, rows)
    if trace.grows is not None and trace.session is not None:
        _check_continuations(trace, rows)
        _check_beginnings(trace, rows)


def request_names(trace: Trace) -> list[str]:
    """What each request is called: its own id, else its row number."""
    own = trace.request_id
    if own is not None and (own.codes >= 0).all():
        return [own.names[code] for code in own.codes.tolist()]
    return [request_name(trace, row) for row in range(len(trace))]


def request_name(trace: Trace, row: int) -> str:
    own = None if trace.request_id is None else trace.request_id[row]
    return str(trace.source_row[row]) if own is None else own


def _check_names(trace: Trace, rows: np.ndarray) -> None:
    own = trace.request_id
    assert own is not None
    unique = (own.codes >= 0).all() and np.bincount(own.codes).max() == 1
    if unique and len(set(own.names)) == len(own.names):
        return
    names = request_names(trace)
    if len(set(names)) == len(names):
        return
    first, second = _twice(names)
    unnamed = next((i for i in (first, second) if own[i] is None), None)
    why = "" if unnamed is None else f" (row {rows[unnamed]} has no id and goes by its number)"
    raise _fault(trace, f"rows {rows[first]} and {rows[second]} are both request {shown(names[second])}{why}")


def _check_continuations(trace: Trace, rows: np.ndarray) -> None:
    """A turn's prompt is what one other session turn left; two turns that grow out of one would share what differs."""
    if trace.after is None:
        return
    growing = np.flatnonzero(_grown_out_of_another(trace))
    followed = trace.after[growing]
    foreign = np.flatnonzero(~_of_session(trace)[followed])
    if len(foreign):
        row, past = growing[foreign[0]], followed[foreign[0]]
        raise _fault(trace, f"row {rows[row]} grows out of row {rows[past]}, whose prompt is not made of a session")
    if len(np.unique(followed)) < len(followed):
        first, second = _twice(followed.tolist())
        both = f"rows {rows[growing[first]]} and {rows[growing[second]]}"
        raise _fault(trace, f"{both} both grow out of row {rows[followed[first]]}; expected one turn that continues it")


def _check_beginnings(trace: Trace, rows: np.ndarray) -> None:
    begins = np.flatnonzero(_of_session(trace) & ~_grown_out_of_another(trace))
    session = trace.session
    assert session is not None
    turns = np.zeros(len(trace), dtype=np.int64) if trace.turn is None else trace.turn
    names = [beginning(str(session[i]), int(turns[i])) for i in begins.tolist()]
    if len(set(names)) < len(names):
        one, other = _twice(names)
        both = f"rows {rows[begins[one]]} and {rows[begins[other]]}"
        raise _fault(trace, f"{both} both begin session content {shown(names[one])}; expected one turn that begins it")


def beginning(session: str, turn: int | None) -> str:
    """The name under which a turn that contains nothing before it begins."""
    return f"{session}/{turn}" if turn is not None and turn > 0 else session


def _of_session(trace: Trace) -> np.ndarray:
    """bool [N]: the prompt is known by the session and the position in it, not by ids or tokens."""
    assert trace.session is not None
    known: np.ndarray = trace.session.codes >= 0
    for ids in (trace.ids, trace.tokens):
        if ids is not None:
            known &= ids.counts == 0
    return known


def _grown_out_of_another(trace: Trace) -> np.ndarray:
    """bool [N]"""
    if trace.after is None or trace.grows is None:
        return np.zeros(len(trace), dtype=bool)
    grown: np.ndarray = _of_session(trace) & trace.grows.astype(bool) & (trace.after >= 0)
    return grown


def _twice(values: Sequence[object]) -> tuple[int, int]:
    """Places of the first value that occurs again, and of its second occurrence."""
    seen: dict[object, int] = {}
    for place, value in enumerate(values):
        if value in seen:
            return seen[value], place
        seen[value] = place
    raise AssertionError("no value occurs twice")


def _fault(trace: Trace, what: str) -> TraceError:
    return TraceError(f"{trace.provenance.path or trace.name}: {what}")
