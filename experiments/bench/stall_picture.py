"""The README's first picture: what a long prompt does to streams that decode already.

    python -m schedlab.experiments.bench.stall_picture [FILE.png]

Four streams decode on a modelled h100 with llama3.1-8b when a prompt of 16,000 tokens arrives. `fcfs` computes it at
once, `chunked_prefill` in chunks beside their decodes. Each mark is a token, each bar a chunk of the prompt.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import schedlab
from schedlab.experiments.analysis.history import Histories, History, histories
from schedlab.experiments.analysis.plots import COLOURS, panels
from schedlab.framework.policy import Policy
from schedlab.framework.request import NS
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.trace import Trace
from schedlab.workloads.workload import Offered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULT = Path(__file__).parent / "results" / "stall.png"
STREAMS = 4
LONG_PROMPT = 16_000
ARRIVES_S = 1.0
SHOWN_S = (0.8, 2.0)


class LongPromptAmongStreams(Offered):
    """Streams that start together, and one long prompt later."""

    def load(self, seed: int = 0) -> Trace:
        rows = np.arange(STREAMS + 1)
        stream = rows < STREAMS
        arrival = np.where(stream, 0, round(ARRIVES_S * NS))
        return Trace(self.name, rows, arrival, np.where(stream, 200, LONG_PROMPT), np.where(stream, 400, 40))


def run(policy: Policy) -> Histories:
    """Step by step, so that every token has a row of its own."""
    engine = schedlab.engines.virtual("llama3.1-8b", "h100", fast_forward=False)
    return histories(schedlab.run(policy, LongPromptAmongStreams(name="stall"), engine))


def draw(runs: dict[str, Histories]) -> Figure:
    figure, axes = panels(len(runs), 1, (9, 4.6), shared=True)
    for axis, (name, past) in zip(axes, runs.items(), strict=True):
        draw_run(axis, name, past)
    axes[-1].set(xlabel="engine time (s)", xlim=SHOWN_S)
    return figure


def draw_run(axis: Axes, name: str, past: Histories) -> None:
    blue, orange, *_ = COLOURS
    requests = in_order(past)
    emitted = [token_times_s(past, history) for history in requests]
    for place, when in enumerate(emitted):
        axis.plot(when, np.full(len(when), place), "|", color=blue, markersize=11)
    prompt = requests[STREAMS]
    chunks = [chunk_s(past, grant.row) for phase in prompt.phases for grant in phase.grants]
    axis.broken_barh(chunks, (STREAMS - 0.3, 0.6), facecolor=orange, edgecolor="white", linewidth=0.5)
    axis.axvline(ARRIVES_S, color="black", linestyle=":", linewidth=1)
    stall_s = max(stalls_s(past))
    title = f"longest stall of a stream {stall_s * 1e3:,.0f} ms, first token of the prompt after {ttft_s(prompt):.2f} s"
    axis.set_title(f"{name}: {title}", loc="left", fontsize=10)
    axis.set_yticks(range(STREAMS + 1), [*(f"stream {i + 1}" for i in range(STREAMS)), "long prompt"])
    axis.set_ylim(-0.6, STREAMS + 0.6)
    axis.grid(axis="y", visible=False)


def in_order(past: Histories) -> list[History]:
    """The streams, and after them the long prompt."""
    return sorted(past.requests, key=lambda history: int(history.request_id))


def stalls_s(past: Histories) -> list[float]:
    """Each stream's longest gap between two tokens."""
    return [float(np.diff(token_times_s(past, history)).max()) for history in in_order(past)[:STREAMS]]


def token_times_s(past: Histories, history: History) -> np.ndarray:
    """When each token after the first was emitted. Every step with decodes must decode all."""
    rows = [row for phase in history.phases if phase.kind == "decode" for row in range(phase.first, phase.stop)]
    rows = [row for row in rows if past.decodes[row]]
    return np.asarray((past.slots.now_ns[rows] + past.slots.duration_ns[rows]) / NS)


def chunk_s(past: Histories, row: int) -> tuple[float, float]:
    """Start and duration of a step."""
    return past.slots.now_ns[row] / NS, past.slots.duration_ns[row] / NS


def ttft_s(history: History) -> float:
    assert history.first_token_ns is not None
    return (history.first_token_ns - history.arrival_ns) / NS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=RESULT)
    path = parser.parse_args().file
    draw({"fcfs": run(FCFS()), "chunked_prefill": run(ChunkedPrefill())}).savefig(path, dpi=150)
    print(path)


if __name__ == "__main__":
    main()
