"""Fair shares among clients: the client that has been served least goes next.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (virtual token counters, VTC; with weights
of clients and any cost function, as in its section on variants).

Differs from the source: cached prompt tokens are not charged, and outputs are charged as they come, not as predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush

from schedlab.framework.policy import Aborted, Admitted, Arrived, Event, Finished, Preempted
from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, chunked_step, nobody_fits, remaining
from schedlab.policies.preemption import ChoosingVictims

Cost = Callable[[int, int], float]
"""Of one request, by its prompt tokens that were computed and its tokens generated; falls with neither."""


@dataclass(slots=True)
class Account:
    """A client's service: the cost of requests that ended, those in service with their prompt tokens, and the lift."""

    settled: float = 0.0
    lift: float = 0.0
    served: dict[Request, int] = field(default_factory=dict)


@dataclass
class Fair(ChoosingVictims):
    """Decodes first, then chunks; among clients with waiting requests the one with the smallest counter, within a
    client the earliest.

    A counter is `input_weight` a prompt token, charged uncached and once, at admission, and `output_weight` a token
    generated, or what `cost` says of each request, divided by the client's share in `client_weights` (1 if it has
    none). A client that returns is lifted to the least counter among those that wait or, if nobody does, to that of
    the last that did: absence earns no credit.
    """

    chunk_size: int = 512
    input_weight: float = 1.0
    output_weight: float = 2.0
    client_weights: Mapping[str, float] = field(default_factory=dict)
    cost: Cost | None = None
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
        for client, weight in self.client_weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"policy.client_weights.{client}: expected a share above 0, found {weight}")
        if isinstance(self.cost, partial) and not (self.cost.args or self.cost.keywords):
            self.cost = self.cost.func  # as a configuration hands over a function

    def schedule(self, step: Step) -> None:
        if chunked_step(step, self._least_served_first, self.chunk_size, self.mode, self.victim) and nobody_fits(step):
            step.hold()

    def counter(self, client: str) -> float:
        """Weighted service of `client` so far, and its lifts."""
        account = self._accounts[client]
        served = sum(self._cost(prompt, request.num_output_tokens) for request, prompt in account.served.items())
        return (account.settled + served) / self._share(client) + account.lift

    def _cost(self, prompt_tokens: int, output_tokens: int) -> float:
        if self.cost is not None:
            return self.cost(prompt_tokens, output_tokens)
        return self.input_weight * prompt_tokens + self.output_weight * output_tokens

    def _share(self, client: str) -> float:
        return self.client_weights.get(client, 1.0)

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
                charge = 0.0 if taken.num_preemptions else self._cost(remaining(step, taken), 0)
                yield taken
                heappush(clients, (counter + charge / self._share(taken.client), i, queue))

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
            account.served[request] = request.num_prompt_tokens - cached_tokens

    def _settle(self, request: Request) -> None:
        account = self._accounts[request.client]
        if request in account.served:
            account.settled += self._cost(account.served.pop(request), request.num_output_tokens)
