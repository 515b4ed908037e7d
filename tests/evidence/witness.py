"""An executor that watches a run from inside: what every request was doing while each batch ran."""

from __future__ import annotations

from schedlab.framework.batch import Batch
from schedlab.framework.executor import StepResult
from schedlab.framework.stub import StubExecutor


class Witness(StubExecutor):
    """`seen[k]`: request id to what it did in the k-th batch, for every request that was ever granted and lives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, tuple]] = []
        self._known: dict[str, object] = {}

    def execute(self, batch: Batch) -> StepResult:
        doing: dict[str, tuple] = {}
        for request, start, tokens in batch.prefills:
            self._known[request.request_id] = request
            decodes = request.state == "running" and request.num_output_tokens and request.num_uncomputed_tokens == 1
            doing[request.request_id] = ("decode",) if decodes else ("prefill", start, tokens)
        for request in batch.decodes:
            doing[request.request_id] = ("decode",)
        for name, request in self._known.items():
            if name not in doing and request.state in ("running", "preempted", "swapped"):
                waits = {"preempted": ("recompute",), "swapped": ("swap",)}
                doing[name] = waits.get(request.state, ("left out",))
        self.seen.append(doing)
        return super().execute(batch)
