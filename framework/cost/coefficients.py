"""A step's cost as nanoseconds per unit of work: the one form that rooflines and measured profiles share.

Each product or attention is `floor + rate * max(0, x - ridge)`: with ridge = floor / rate this is the roofline's
max(floor, rate * x); with ridge = 0 it is a sum. For a fixed set of decodes the cost is a constant plus a rate times
the sum of their contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import cast

import numpy as np

from schedlab.framework.cost.estimate import Bound, Estimate, estimate, largest, overhead_s
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.cost.routing import Routing
from schedlab.framework.executor import check_duration

FRACTION_BITS = 20
"""Decode durations are fixed-point: whole 2^-20 ns, so that sums and products of integers are exact in any order."""
_ONE = 1 << FRACTION_BITS
_HALF = _ONE >> 1
Rates = tuple[float, ...]
"""The fields of `Coefficients` in order."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Nanoseconds per unit; the units are those of `Work`.

    idle_ns      a step that only copies or does nothing
    step_ns      a step that computes, whatever its size; request_ns: each request in it
    prefill_ns   each prefill grant, over and above a request
    prefill_step_ns, decode_step_ns   a step that prefills, that decodes: its attention is a kernel of its own
    matrix_ns    a step of two tokens or more: products of two matrices, for which a CPU has other kernels
    weights_ns, linear_ns, linear_ridge      projections: floor, per token beyond `linear_ridge` tokens
    experts_ns, expert_token_ns   all experts of all layers read, of which a step reads its share; each token's
    num_experts, experts_per_token, routing_skew, expert_devices, expert_sources   what that share follows from
                 (`routing.py`); 0 experts in a dense model
    token_ns     each token's other traffic
    head_ns, logits_ns, logits_ridge         logits if any row is due: floor, per row beyond `logits_ridge` rows
    row_ns       each row's sampling and traffic
    key_ns, pair_ns, pair_ridge              prefill attention: per key, per pair beyond `pair_ridge` pairs a key
    decode_key_ns    each key that decodes read; `decode_computes`: bound by compute, not memory
    copy_ns, copied_byte_ns                  block copies: latency, per byte
    host_ns, host_request_ns   of step_ns and request_ns, what a chain of steps takes once: the host and the scheduler;
                               0 in a measured profile, which cannot tell them apart
    """

    idle_ns: float = 0.0
    step_ns: float = 0.0
    request_ns: float = 0.0
    prefill_ns: float = 0.0
    prefill_step_ns: float = 0.0
    decode_step_ns: float = 0.0
    matrix_ns: float = 0.0
    weights_ns: float = 0.0
    linear_ns: float = 0.0
    linear_ridge: float = 0.0
    token_ns: float = 0.0
    head_ns: float = 0.0
    logits_ns: float = 0.0
    logits_ridge: float = 0.0
    row_ns: float = 0.0
    key_ns: float = 0.0
    pair_ns: float = 0.0
    pair_ridge: float = 0.0
    decode_key_ns: float = 0.0
    decode_computes: bool = False
    copy_ns: float = 0.0
    copied_byte_ns: float = 0.0
    host_ns: float = 0.0
    host_request_ns: float = 0.0
    experts_ns: float = 0.0
    expert_token_ns: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    routing_skew: float = 0.0
    expert_devices: int = 1
    expert_sources: int = 1

    @classmethod
    def from_roofline(cls, roofline: Roofline, hardware: Hardware) -> Coefficients:
        """The roofline's parts and overheads, taken at one unit of each kind of work."""

        def collective(work: Work) -> float:
            parts = roofline.collectives(work), roofline.exchange(work)
            return sum(part.transfer_s(hardware) for part in parts) * 1e9

        decode = _by_part(estimate(roofline, hardware, Work.decode(1)))
        prefill = _by_part(estimate(roofline, hardware, Work(prefill_pairs=1, prefill_keys=1)))
        copy = _by_part(estimate(roofline, hardware, Work(copied_bytes=1)))
        works = (Work(), Work(tokens=1), Work(tokens=1, decodes=1))
        idle, step, request = (overhead_s(roofline, hardware, work) * 1e9 for work in works)
        attention = hardware.attention_us * 1e3 * roofline.model.num_hidden_layers
        linear_ns, weights_ns = decode["linears"]
        routing = roofline.routing
        expert_ns, chosen_ns = decode["experts"]
        logits_ns, head_ns = decode["logits"]
        pair_ns, key_ns = prefill["prefill attention"]
        attention_ns, read_ns = decode["decode attention"]
        return cls(
            idle_ns=idle, step_ns=step, request_ns=request - step - attention,
            prefill_step_ns=attention, decode_step_ns=attention,
            weights_ns=weights_ns, linear_ns=linear_ns, linear_ridge=weights_ns / linear_ns,
            token_ns=max(decode["activations"]) + max(decode["kv write"]) + collective(Work(tokens=1)),
            head_ns=head_ns, logits_ns=logits_ns, logits_ridge=head_ns / logits_ns,
            row_ns=max(decode["sampling"]) + collective(Work(rows=1)),
            key_ns=key_ns, pair_ns=pair_ns, pair_ridge=key_ns / pair_ns,
            decode_key_ns=max(attention_ns, read_ns), decode_computes=attention_ns > read_ns,
            copy_ns=hardware.copy_us * 1e3, copied_byte_ns=copy["block copies"][1],
            host_ns=(hardware.step_us + hardware.scheduler_us) * 1e3,
            host_request_ns=(hardware.request_us + hardware.scheduler_request_us) * 1e3,
            experts_ns=chosen_ns * routing.num_experts / routing.distinct_of_one if routing.num_experts else 0.0,
            expert_token_ns=expert_ns, num_experts=routing.num_experts, experts_per_token=routing.chosen,
            routing_skew=routing.skew, expert_devices=routing.devices, expert_sources=routing.sources,
        )  # fmt: skip

    @property
    def rates(self) -> Rates:
        """All of them in order, for `shares_ns`."""
        return _rates(self)

    @property
    def routing(self) -> Routing:
        return Routing(
            self.num_experts, self.experts_per_token, self.routing_skew, self.expert_devices, self.expert_sources
        )

    def experts_read_ns(self, tokens: int) -> float:
        """Time of reading the experts that `tokens` tokens choose."""
        return self.experts_ns * self.routing.distinct(tokens) / self.num_experts

    def shares_ns(
        self, tokens: int, rows: int, decodes: int, prefills: int, pairs: int, keys: int, decode_keys: int, copied: int
    ) -> tuple[float, float, float]:
        """(compute, memory, overhead) nanoseconds of one step; the arguments are the fields of `Work` in order."""
        read_ns = self.experts_read_ns(tokens) if self.num_experts and tokens else 0.0
        return shares_ns(self.rates, tokens, rows, decodes, prefills, pairs, keys, decode_keys, copied, read_ns)

    def total_ns(self, work: Work) -> float:
        """Duration of one step of `work`, not rounded."""
        return sum(self.shares_ns(
            work.tokens, work.rows, work.decodes, work.prefills,
            work.prefill_pairs, work.prefill_keys, work.decode_keys, work.copied_bytes,
        ))  # fmt: skip


_rates = cast(Callable[[Coefficients], Rates], attrgetter(*(field.name for field in fields(Coefficients))))


def shares_ns(
    rates: Rates,
    tokens: float,
    rows: float,
    decodes: float,
    prefills: float,
    pairs: float,
    keys: float,
    decode_keys: float,
    copied: float,
    read_ns: float = 0.0,
) -> tuple[float, float, float]:
    """(compute, memory, overhead) nanoseconds of one step at `rates`; then the fields of `Work` in order.

    `read_ns`: the time of reading the experts that the tokens choose, in a model that has any.
    """
    (
        idle_ns, step_ns, request_ns, prefill_ns, prefill_step_ns, decode_step_ns, matrix_ns, weights_ns, linear_ns,
        linear_ridge, token_ns, head_ns, logits_ns, logits_ridge, row_ns, key_ns, pair_ns, pair_ridge, decode_key_ns,
        decode_computes, copy_ns, copied_byte_ns, _, _, _, expert_token_ns, num_experts, _, _, _, _,
    ) = rates  # fmt: skip
    compute = memory = 0.0
    overhead = idle_ns
    if tokens:
        overhead = step_ns + request_ns * (decodes + prefills)
        if prefills:
            overhead += prefill_step_ns + prefill_ns * prefills
        if decodes:
            overhead += decode_step_ns
        if tokens > 1:
            overhead += matrix_ns
        memory = token_ns * tokens + row_ns * rows
        if tokens > linear_ridge:
            compute = weights_ns + linear_ns * (tokens - linear_ridge)
        else:
            memory += weights_ns
        if num_experts:
            computed = expert_token_ns * tokens
            if computed > read_ns:
                compute += computed
            else:
                memory += read_ns
        if rows > logits_ridge:
            compute += head_ns + logits_ns * (rows - logits_ridge)
        elif rows:
            memory += head_ns
        ridge = pair_ridge * keys
        if pairs > ridge:
            compute += key_ns * keys + pair_ns * (pairs - ridge)
        else:
            memory += key_ns * keys
        if decode_computes:
            compute += decode_key_ns * decode_keys
        else:
            memory += decode_key_ns * decode_keys
    if copied:
        overhead += copy_ns
        memory += copied_byte_ns * copied
    return compute, memory, overhead


def _by_part(step: Estimate) -> dict[str, tuple[float, float]]:
    """(compute, transfer) nanoseconds of each part."""
    return {timed.part.name: (timed.compute_s * 1e9, timed.transfer_s * 1e9) for timed in step.parts}


class DecodeCost:
    """Duration of a step that gives one token to each of a fixed number of requests, as a function of its context.

    `duration_ns` is the one function for stepping and jumping: monotone, exact integer arithmetic, rounded once. A step
    that follows another of its chain has the base `further`: it takes no time of the host's, but never less than the
    compute and memory time that explain it.
    """

    __slots__ = ("_envelope", "base", "further", "slope")
    shift = FRACTION_BITS

    def __init__(self, coefficients: Coefficients, explained: Coefficients, num_decodes: int) -> None:
        """`explained` gives the compute and memory time that `bound` is judged by; the rest is overhead."""
        n = num_decodes
        base = sum(coefficients.shares_ns(n, n, n, 0, 0, 0, 0, 0))
        check_duration(base)
        compute, memory, _ = explained.shares_ns(n, n, n, 0, 0, 0, 0, 0)
        self.base = round(base * _ONE) + _HALF
        host = min(coefficients.host_ns + coefficients.host_request_ns * n, max(base - compute - memory, 0.0))
        self.further = round((base - host) * _ONE) + _HALF
        self.slope = round(coefficients.decode_key_ns * _ONE)
        rate = explained.decode_key_ns
        self._envelope = _largest_over_context(
            (compute, rate if explained.decode_computes else 0.0),
            (memory, 0.0 if explained.decode_computes else rate),
            (base - compute - memory, coefficients.decode_key_ns - rate),
        )

    def duration_ns(self, context_sum: int) -> int:
        """Nanoseconds of a step after which the decodes' contexts sum to `context_sum`."""
        return (self.base + self.slope * context_sum) >> FRACTION_BITS

    def chain_ns(self, context_sum: int, growth: int, num_steps: int) -> int:
        """Nanoseconds of `num_steps` steps back to back, of contexts `context_sum, context_sum + growth, …`."""
        contexts = range(context_sum + growth, context_sum + growth * num_steps, growth)
        further = sum([(self.further + self.slope * context) >> FRACTION_BITS for context in contexts])
        return self.duration_ns(context_sum) + further

    def durations_ns(self, context_sum: int, growth: int, num_steps: int) -> np.ndarray:
        """int64 [num_steps]: `duration_ns` of contexts `context_sum, context_sum + growth, …`, the same to the bit."""
        contexts = context_sum + growth * np.arange(num_steps, dtype=np.int64)
        return (self.base + self.slope * contexts) >> FRACTION_BITS

    def bound(self, context_sum: int) -> Bound:
        """What limits such a step."""
        for limit, name in self._envelope:
            if context_sum < limit:
                return name
        return self._envelope[-1][1]


Line = tuple[float, float]


def _largest_over_context(compute: Line, memory: Line, overhead: Line) -> tuple[tuple[float, Bound], ...]:
    """Pieces (upper limit of context, bound) of the upper envelope of three lines (value at 0, slope)."""
    lines = (compute, memory, overhead)
    crossings = {
        (a - c) / (d - b)
        for i, (a, b) in enumerate(lines) for c, d in lines[i + 1 :] if d != b and (a - c) / (d - b) > 0
    }  # fmt: skip
    limits = [*sorted(crossings), float("inf")]
    starts = [0.0, *limits]
    pieces: list[tuple[float, Bound]] = []
    for start, limit in zip(starts, limits, strict=False):
        middle = start + 1.0 if limit == float("inf") else (start + limit) / 2
        pieces.append((limit, largest(*(value + slope * middle for value, slope in lines))))
    return tuple(pieces)
