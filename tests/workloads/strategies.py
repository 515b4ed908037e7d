"""Random traces of every shape: ids or segments, sessions with and without think times, priorities, classes."""

import numpy as np
from hypothesis import strategies as st

from schedlab.framework.request import SLO
from schedlab.workloads.dependencies import with_parents
from schedlab.workloads.soundness import request_names
from schedlab.workloads.trace import BlockIds, Labels, Trace

MS = 10**6


def ragged(rows, width=1, widths=None):
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    flat = np.array([v for r in rows for v in r], dtype=np.int64)
    return BlockIds(
        offsets, flat, width, None if widths is None else np.array([v for r in widths for v in r], np.int64)
    )


@st.composite
def traces(draw, max_rows=12, ids=True, sessions=True, extras=True):
    n = draw(st.integers(1, max_rows))
    numbers = lambda low, high: np.array(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)), dtype=np.int64)  # noqa: E731
    arrival = np.sort(numbers(0, 50)) * MS
    prompt = numbers(1, 70)
    columns = {}
    if ids and draw(st.booleans()):
        width = draw(st.sampled_from([1, 4, 16]))
        columns["ids"] = ragged([draw(st.lists(st.integers(0, 2), min_size=-(-p // width), max_size=-(-p // width)))
                                 for p in prompt.tolist()], width)  # fmt: skip
    if sessions and draw(st.booleans()):
        codes = numbers(-1, 2)
        columns |= {"session": Labels(codes, ("a", "b", "c"))}
        turn, after, last = np.full(n, -1), np.full(n, -1), {}
        for row, code in enumerate(codes.tolist()):
            if code >= 0:
                after[row], turn[row] = last.get(code, (-1, -1))
                turn[row] += 1
                last[code] = row, turn[row]
        columns["turn"] = turn
        tied = (after >= 0) & (numbers(0, 2) > 0)
        if tied.any():
            columns |= {"after": np.where(tied, after, -1), "think_ns": np.where(tied, numbers(0, 20) * MS, -1)}
    if extras and draw(st.booleans()):
        columns |= {
            "priority": numbers(-2, 2),
            "deadline_ns": np.where(numbers(0, 1) > 0, numbers(1, 9) * MS, -1),
            "abort_ns": np.where(numbers(0, 1) > 0, numbers(1, 9) * MS, -1),
            "client": Labels(numbers(-1, 1), ("x", "y")),
            "slo": Labels(numbers(-1, 0), ("fast",)),
            "slo_classes": {"fast": SLO("fast", ttft_s=0.5)},
        }
    return Trace("random", np.arange(n), arrival, prompt, numbers(1, 9), **columns)


@st.composite
def programs(draw, max_rows=9):
    """Traces of requests that wait for any number of others, some in sessions, in an order of the file's own."""
    n = draw(st.integers(1, max_rows))
    order = draw(st.permutations(range(n)))
    parents = [[] for _ in range(n)]
    for place, row in enumerate(order):
        chosen = draw(st.lists(st.sampled_from(order[:place]), max_size=3, unique=True)) if place else []
        parents[row] = chosen
    numbers = lambda low, high: np.array(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)), dtype=np.int64)  # noqa: E731
    trace = Trace(
        "programs", np.arange(n), numbers(0, 50) * MS, numbers(1, 70), numbers(1, 9),
        session=Labels(numbers(-1, 1), ("a", "b")) if draw(st.booleans()) else None,
        request_id=Labels(np.arange(n), tuple(f"r{i}" for i in range(n))),
    )  # fmt: skip
    return with_parents(trace, ragged(parents), numbers(0, 20) * MS).sorted()


def parents_of(trace: Trace) -> dict[str, set[str]]:
    """By name, what each request waits for."""
    names = request_names(trace)
    after = np.full(len(trace), -1) if trace.after is None else trace.after
    others = [[]] * len(trace) if trace.also_after is None else [trace.also_after.row(i) for i in range(len(trace))]
    return {
        names[row]: {names[int(p)] for p in ([after[row]] if after[row] >= 0 else []) + [*others[row]]}
        for row in range(len(trace))
    }


def with_stages(trace: Trace, preparation_ns: int, delivery_ns: int) -> Trace:
    """Every request with the same stages of its own."""
    every = np.ones(len(trace), dtype=np.int64)
    return trace.with_columns(preparation_ns=every * preparation_ns, delivery_ns=every * delivery_ns)
