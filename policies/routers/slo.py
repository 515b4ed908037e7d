"""The fullest replica that still meets the request's SLO, so that others stay free for what needs them."""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.framework.cluster.fleet import Fleet
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import Request
from schedlab.policies.routers.common import least


@dataclass
class SLORouter(Router):
    """By the replica's estimator: the first token comes when what is pending there and the prompt itself are computed,
    in chunks of `chunk_size` beside all decodes; the next ones each after a step of all decodes. `margin` is the share
    of a limit that a prediction may take. Where no replica meets both limits, and for a request without any, the one
    with the earliest first token.
    """

    needs = frozenset({"load"})
    chunk_size: int = 2048
    margin: float = 0.8

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ConfigError(f"router.chunk_size: expected 1 or more, found {self.chunk_size}")
        if not 0 < self.margin <= 1:
            raise ConfigError(f"router.margin: expected more than 0, at most 1, found {self.margin}")

    def route(self, request: Request, fleet: Fleet) -> ReplicaView:
        first = {replica: self.first_token_s(replica, request) for replica in fleet.replicas}
        slo = request.slo
        if slo is not None and (slo.ttft_s is not None or slo.tpot_s is not None):
            meeting = [
                replica for replica in fleet.replicas
                if (slo.ttft_s is None or first[replica] <= self.margin * slo.ttft_s)
                and (slo.tpot_s is None or self.gap_s(replica, request) <= self.margin * slo.tpot_s)
            ]  # fmt: skip
            if meeting:
                return least(meeting, lambda replica: -replica.context_tokens)
        return least(fleet.replicas, first.__getitem__)

    def first_token_s(self, replica: ReplicaView, request: Request) -> float:
        """Seconds to the first token of `request` there."""
        estimator, decodes = replica.estimator, replica.in_flight
        context, left = replica.context_tokens, replica.pending_prefill_tokens + request.num_prompt_tokens
        whole, rest = divmod(left, self.chunk_size)
        chunk = estimator.step_s(self.chunk_size, 0, decodes, context) if whole else 0.0
        return whole * chunk + (estimator.step_s(rest, 0, decodes, context) if rest else 0.0)

    def gap_s(self, replica: ReplicaView, request: Request) -> float:
        """Seconds of a step in which all that is there decodes."""
        context = replica.context_tokens + request.num_prompt_tokens
        return replica.estimator.step_s(decodes=replica.in_flight + 1, decode_context=context)
