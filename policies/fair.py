"""Fair shares among clients: the client that has been served least goes next.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (virtual token counters, VTC).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from schedlab.framework.policy import Aborted, Admitted, Arrived, Event, Finished, Preempted
from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, chunked_step, nobody_fits, remaining
from schedlab.policies.preemption import ChoosingVictims


@dataclass(slots=True)
class Account:
    """A client's service: tokens charged for good, requests in service whose output still counts up, and the lift."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    lift: float = 0.0
    served: dict[Request, None] = field(default_factory=dict)


@dataclass
class Fair(ChoosingVictims):
    """Decodes first, then chunks; among clients with waiting requests the one with the smallest counter, within a
    client the earliest.

    A counter is `input_weight` a prompt token, charged uncached and once, at admission, and `output_weight` a token
    generated. A client that returns is lifted to the least counter among those that wait or, if nobody does, to that of
    the last that did: absence earns no credit.
    """

    chunk_size: int = 512
    input_weight: float = 1.0
    output_weight: float = 2.0
    _accounts: dict[str, Account] = field(default_factory=dict, init=False, repr=False)
    _waiting: dict[str, dict[Request, None]] = field(default_factory=dict, init=False, repr=False)
    _last_to_wait: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        if not (0 < self.input_weight < math.inf and 0 < self.output_weight < math.inf):
            raise ValueError(
                f"policy: expected input_weight and output_weight above 0, "
                f"found {self.input_weight}, {self.output_weight}"
            )

    def schedule(self, step: Step) -> None:
        if chunked_step(step, self._least_served_first, self.chunk_size, self.mode, self.victim) and nobody_fits(step):
            step.hold()

    def counter(self, client: str) -> float:
        """Weighted service of `client` so far, and its lifts."""
        account = self._accounts[client]
        output = account.output_tokens + sum(request.num_output_tokens for request in account.served)
        return self.input_weight * account.prompt_tokens + self.output_weight * output + account.lift

    def _least_served_first(self, step: Step) -> Iterator[Request]:
        """Waiting requests in the order in which clients come up if each is charged for what is taken."""
        queues: dict[str, list[Request]] = {}
        for request in step.waiting:
            queues.setdefault(request.client, []).append(request)
        clients = [(self.counter(client), i, iter(queue)) for i, (client, queue) in enumerate(queues.items())]
        heapify(clients)
        while clients:
            counter, i, queue = heappop(clients)
            taken = next(queue, None)
            if taken is not None:
                charge = 0 if taken.num_preemptions else remaining(step, taken)
                yield taken
                heappush(clients, (counter + self.input_weight * charge, i, queue))

    # -- accounts --

    def observe(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self._arrived(event.request.client)
            self._waits(event.request)
        elif isinstance(event, Preempted):
            self._waits(event.request)
        elif isinstance(event, Admitted):
            self._waits_no_longer(event.request)
            self._charge(event.request, event.cached_tokens)
        elif isinstance(event, (Aborted, Finished)):
            self._waits_no_longer(event.request)
            self._settle(event.request)

    def _arrived(self, client: str) -> None:
        account = self._accounts.setdefault(client, Account())
        if client not in self._waiting:
            others = [self.counter(other) for other in self._waiting]
            if not others and self._last_to_wait is not None:
                others = [self.counter(self._last_to_wait)]
            account.lift += max(min(others, default=0.0) - self.counter(client), 0.0)

    def _waits(self, request: Request) -> None:
        self._waiting.setdefault(request.client, {})[request] = None

    def _waits_no_longer(self, request: Request) -> None:
        waiting = self._waiting.get(request.client, {})
        if request in waiting:
            self._last_to_wait = request.client
            del waiting[request]
            if not waiting:
                del self._waiting[request.client]

    def _charge(self, request: Request, cached_tokens: int) -> None:
        account = self._accounts[request.client]
        if not request.num_preemptions:
            account.prompt_tokens += request.num_prompt_tokens - cached_tokens
            account.served[request] = None

    def _settle(self, request: Request) -> None:
        account = self._accounts[request.client]
        if request in account.served:
            account.output_tokens += request.num_output_tokens
            del account.served[request]
