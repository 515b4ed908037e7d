"""The router's own books on one replica: what it sent there, and what it has heard since."""

from __future__ import annotations

from schedlab.framework.request import EngineRequest


class Load:
    """`in_flight` requests were sent and have not ended; `context_tokens` of them were sent; of these
    `pending_prefill_tokens` belong to requests without a first token. Tokens are counted as of the sending.
    """

    __slots__ = ("_sent", "context_tokens", "in_flight", "num_routed", "pending_prefill_tokens")

    def __init__(self) -> None:
        self.in_flight = self.pending_prefill_tokens = self.context_tokens = self.num_routed = 0
        self._sent: dict[EngineRequest, tuple[int, int]] = {}  # (tokens of the context, to be computed first)

    def send(self, request: EngineRequest) -> None:
        context = request.num_tokens
        pending = request.num_uncomputed_tokens if request.first_token_ns is None else 0
        self._sent[request] = context, pending
        self.in_flight += 1
        self.num_routed += 1
        self.context_tokens += context
        self.pending_prefill_tokens += pending

    def first_token(self, request: EngineRequest) -> None:
        context, pending = self._sent[request]
        self._sent[request] = context, 0
        self.pending_prefill_tokens -= pending

    def end(self, request: EngineRequest) -> None:
        context, pending = self._sent.pop(request)
        self.in_flight -= 1
        self.context_tokens -= context
        self.pending_prefill_tokens -= pending
