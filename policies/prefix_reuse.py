"""Longest cached prefix first, with bounded aging, and duplicates of a pending prefix deferred.

Source: cache-aware scheduling of SGLang (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", NeurIPS 2024). The aging term bounds the tail that plain longest-prefix-first is known for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from schedlab.framework.policy import Policy
from schedlab.framework.request import Request
from schedlab.framework.step import PreemptMode, Step
from schedlab.policies.common import admit, check_mode, continue_prefills, decode_all


@dataclass
class PrefixReuse(Policy):
    """Decodes first, then chunks; waiting requests in the order of `aging * arrival - cached tokens`.

    `aging_tokens_per_s`: a second of waiting weighs as much as so many cached tokens, so nobody is overtaken by those
    that arrive later than its disadvantage divided by it. The order needs no `now`, so a heap fed by `cache_changed`
    keeps it.
    """

    chunk_size: int = 512
    aging_tokens_per_s: float = 100.0
    preempt_mode: PreemptMode = "recompute"
    _heap: list[tuple[float, int, Request]] = field(default_factory=list, init=False, repr=False)
    _latest: dict[Request, int] = field(default_factory=dict, init=False, repr=False)
    _pushes: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_mode(self.preempt_mode)
        if self.chunk_size < 1 or not self.aging_tokens_per_s > 0:
            raise ValueError(
                f"policy: expected chunk_size >= 1 and aging_tokens_per_s > 0, "
                f"found {self.chunk_size}, {self.aging_tokens_per_s}"
            )

    def schedule(self, step: Step) -> None:
        before = step.token_budget
        undisturbed = decode_all(step, self.preempt_mode, self.chunk_size)
        room = min(self.chunk_size, before) - (before - step.token_budget)
        chunks = continue_prefills(step, room, self.preempt_mode)
        if undisturbed:
            chunks += self._admit(step, room - chunks)
            if not chunks:
                step.hold()

    def _rank(self, step: Step) -> None:
        for request in step.cache_changed:
            key = self.aging_tokens_per_s * request.arrival_s - step.cached_tokens(request)
            self._pushes += 1
            self._latest[request] = self._pushes
            heappush(self._heap, (key, self._pushes, request))

    def _admit(self, step: Step, room: int) -> int:
        self._rank(step)  # after the decodes, whose blocks may have evicted what a waiting request counted on
        taken: list[tuple[float, int, Request]] = []
        granted = admit(step, self._best_first(step, taken), room)
        for entry in taken:  # an admitted request leaves the heap when it is met again
            heappush(self._heap, entry)
        return granted

    def _best_first(self, step: Step, taken: list[tuple[float, int, Request]]) -> Iterator[Request]:
        """Waiting requests by rank; those whose prefix somebody is computing right now are passed over in this step."""
        while self._heap:
            entry = heappop(self._heap)
            _, push, request = entry
            if self._latest.get(request) != push:
                continue  # ranked anew since
            if request.state not in ("waiting", "preempted", "swapped"):
                del self._latest[request]
                continue
            taken.append(entry)
            if not step.pending_tokens(request):
                yield request
