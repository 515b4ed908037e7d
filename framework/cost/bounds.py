"""What no schedule can beat: lower bounds on mean TTFT and mean E2E of a set of requests, an upper one on throughput.

Times are nanoseconds.

**The machine.** A step with work takes at least a fixed part `step_ns` and, over and above, a sum over its grants: each
computed token, attended pair and emitted token has a least price (`Prices`). What a batch shares (reading the weights
once) is left out, or divided among as many as a step may hold. So in d nanoseconds of steps, work of at most d
nanoseconds is done, whoever it is done for: this is work conservation, and all that the bounds use of the engine.

**Relaxed shortest remaining work.** Let request i be released when it becomes visible, with work w_i. Take any run of
the engine. Within each step, do the work of its grants one after another from the step's beginning: it fits, ending at
least `step_ns` before the step does. This is a preemptive schedule of one machine in which i ends at some C_i, and i's
token appears at the end of a step: at C_i + step_ns or later. A step has no request that arrived after it began, so no
work is done before its release. Of all preemptive schedules of one machine, shortest remaining work first has the least
sum of C_i (Schrage, Operations Research 16(3), 1968). Hence the mean latency is at least SRPT's mean of C_i, plus
step_ns, minus the mean arrival. Leaving requests out can only lower SRPT's sum, so any subset may be averaged.

**Alone.** A request that has the machine to itself, from the moment of its release, with its prefix in the cache as far
as any other request shares it: steps of at most `max_num_batched_tokens` for its prompt, then one step a token. Other
requests in a step only lengthen it. This bounds each request, and so every quantile; under load it is weak.

**Throughput.** All work is done between the first arrival and the last token, and none before its release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from schedlab.framework.cost.coefficients import FRACTION_BITS, Coefficients
from schedlab.framework.cost.windows import Mixed, Window, seen_at_most
from schedlab.framework.request import NS

ROUNDING_NS = 0.501
"""How much shorter than its cost a step may last on a clock of whole nanoseconds, fixed-point arithmetic included."""
QUANTILES = (50, 90, 95, 99)


def least_per_unit(floor: float, rate: float, ridge: float, most: float) -> float:
    """The least of (floor + rate · max(0, x - ridge)) / x over 1 <= x <= `most`.

    The quotient is monotone on either side of the ridge, so its minimum lies at an end or at the ridge.
    """
    places = (1.0, min(max(ridge, 1.0), most), most)
    return min((floor + rate * max(0.0, x - ridge)) / x for x in places)


@dataclass(frozen=True, slots=True)
class Prices:
    """The least that a unit of a request's own work costs, in nanoseconds.

    step_ns      a step, over and above its work
    token_ns     a computed token: projections at the best rate of any batch, other traffic
    row_ns       an emitted token: logits at the best rate of any batch, sampling, the request's overhead
    pair_ns      a (query, key) pair of a prompt
    key_ns       a key that a decode step reads
    resumed_key_ns   the same, if the token may be emitted by a resume after a preemption: this prefills, and is priced
                 by the keys that any attention kernel reads
    alone_*      what a step costs that serves one request: the whole of `weights`, of the head, and the overheads
    """

    coefficients: Coefficients
    max_num_batched_tokens: int
    max_num_seqs: int

    @property
    def step_ns(self) -> float:
        return self.coefficients.step_ns

    @property
    def token_ns(self) -> float:
        c = self.coefficients
        most = self.max_num_batched_tokens
        experts = float(self.experts_ns(np.array([most]))[0]) / most
        return c.token_ns + least_per_unit(c.weights_ns, c.linear_ns, c.linear_ridge, most) + experts

    def experts_ns(self, tokens_N: np.ndarray) -> np.ndarray:
        """Of a step of so many tokens. A token's share falls with their number, as more of them read the same."""
        c = self.coefficients
        if not c.num_experts:
            return np.zeros(len(tokens_N))
        read_N = c.experts_ns * c.routing.distinct_of(tokens_N) / c.num_experts
        return np.asarray(np.maximum(read_N, c.expert_token_ns * tokens_N))

    @property
    def row_ns(self) -> float:
        c = self.coefficients
        return c.row_ns + c.request_ns + least_per_unit(c.head_ns, c.logits_ns, c.logits_ridge, self.max_num_seqs)

    @property
    def decode_key_ns(self) -> float:
        """As the jump's fixed-point arithmetic has it, if that is less."""
        exact = self.coefficients.decode_key_ns
        return min(exact, round(exact * (1 << FRACTION_BITS)) / (1 << FRACTION_BITS))

    @property
    def pair_ns(self) -> float:
        """Of a chunk's pairs, or of a chunk of one token, which the decode kernel attends."""
        c = self.coefficients
        chunk = min(c.pair_ns, c.key_ns / c.pair_ridge) if c.pair_ridge else c.pair_ns
        return min(chunk, self.decode_key_ns)

    @property
    def resumed_key_ns(self) -> float:
        return min(self.coefficients.key_ns, self.decode_key_ns)

    @property
    def alone_step_ns(self) -> float:
        """Of a step that serves one request, whatever it computes, before its tokens and keys."""
        c = self.coefficients
        kernels = min(c.prefill_step_ns + c.prefill_ns, c.decode_step_ns)
        return c.step_ns + c.request_ns + kernels

    def alone_linears_ns(self, tokens_N: np.ndarray, steps_N: np.ndarray) -> np.ndarray:
        """Projections of so many tokens in so many steps or more.

        In k steps at least k · floor + rate · (tokens - k · ridge), which grows with k where floor >= rate · ridge.
        """
        c = self.coefficients
        experts_N = self.alone_experts_ns(tokens_N, steps_N)
        floor_N = steps_N * c.weights_ns
        if c.weights_ns >= c.linear_ns * c.linear_ridge * (1 - 1e-12):
            return np.asarray(floor_N + c.linear_ns * np.maximum(0.0, tokens_N - steps_N * c.linear_ridge) + experts_N)
        least = least_per_unit(c.weights_ns, c.linear_ns, c.linear_ridge, self.max_num_batched_tokens)
        return np.asarray(np.maximum(floor_N, least * tokens_N) + experts_N)

    def alone_experts_ns(self, tokens_N: np.ndarray, steps_N: np.ndarray) -> np.ndarray:
        """Of so many tokens in so many steps or more: what they cost in one step, which is concave in them or a
        multiple of them, or what a token costs in each step, whichever is more."""
        return np.asarray(np.maximum(self.experts_ns(tokens_N), steps_N * self.experts_ns(np.ones(1))))

    @property
    def alone_row_ns(self) -> float:
        c = self.coefficients
        return c.row_ns + c.head_ns + c.logits_ns * max(0.0, 1 - c.logits_ridge)

    @property
    def kept(self) -> float:
        """The part of any step's cost that rounding leaves at least."""
        c = self.coefficients
        least = self.alone_step_ns + c.weights_ns + c.token_ns
        return max(0.0, 1 - ROUNDING_NS / least) if least else 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests as columns. Times in ns; `output_N` is what was emitted, `hit_N` the longest prefix that any other
    request could leave in the cache; `resumes`: whether a request may be preempted after its first token."""

    arrival_N: np.ndarray
    visible_N: np.ndarray
    delivery_N: np.ndarray
    prompt_N: np.ndarray
    output_N: np.ndarray
    hit_N: np.ndarray
    window: Window = None
    resumes: bool = True

    def __len__(self) -> int:
        return len(self.arrival_N)

    def where(self, chosen_N: np.ndarray) -> Demand:
        columns = (self.arrival_N, self.visible_N, self.delivery_N, self.prompt_N, self.output_N, self.hit_N)
        arrival, visible, delivery, prompt, output, hit = (column[chosen_N] for column in columns)
        return Demand(arrival, visible, delivery, prompt, output, hit, self.window, self.resumes)

    @property
    def computed_N(self) -> np.ndarray:
        """Prompt tokens that must be computed: at least the last."""
        return np.asarray(np.maximum(self.prompt_N - self.hit_N, 1))

    def _seen(self, position_N: np.ndarray) -> np.ndarray:
        """Sum of the keys that queries at 1 … position see, exact."""
        shares = self.window.shares if isinstance(self.window, Mixed) else ((self.window, 1),)
        layers = sum(count for _, count in shares)
        return np.asarray(sum(count * _summed(position_N, window) for window, count in shares) / layers)

    @property
    def _rounding(self) -> float:
        """Keys that rounding a mean over layers takes from a query at most."""
        return 0.5 if isinstance(self.window, Mixed) else 0.0

    @property
    def pairs_N(self) -> np.ndarray:
        """(query, key) pairs of the prompt tokens that must be computed."""
        exact = self._seen(self.prompt_N) - self._seen(self.prompt_N - self.computed_N)
        return np.asarray(exact - self._rounding * self.computed_N)

    @property
    def decoded_keys_N(self) -> np.ndarray:
        """Keys read by the emissions after the first: contexts prompt + 1 … prompt + output - 1."""
        last = np.maximum(self.prompt_N + self.output_N - 1, self.prompt_N)
        return np.asarray(self._seen(last) - self._seen(self.prompt_N) - self._rounding * self.decodes_N)

    @property
    def prompt_keys_N(self) -> np.ndarray:
        """Keys that the emission of the first token reads."""
        return np.asarray(seen_at_most(self.prompt_N, np.ones_like(self.prompt_N), self.window))

    @property
    def decodes_N(self) -> np.ndarray:
        return np.asarray(np.maximum(self.output_N - 1, 0))


def _summed(position_N: np.ndarray, window: int | None) -> np.ndarray:
    """Sum of min(x, window) over x = 1 … position."""
    p = position_N.astype(np.float64)
    full = 0.0 * p if window is None else np.maximum(p - window, 0)
    within = p - full
    return np.asarray(within * (within + 1) / 2 + full * (window or 0))


def prefill_work_ns(demand: Demand, prices: Prices) -> np.ndarray:
    """Work up to the first token, float64 [N]."""
    return np.asarray(
        prices.kept * (prices.token_ns * demand.computed_N + prices.pair_ns * demand.pairs_N + prices.row_ns)
    )


def total_work_ns(demand: Demand, prices: Prices) -> np.ndarray:
    """Work up to the last token, float64 [N].

    Where requests may be resumed, prompt attention is priced by the keys of the first emission: one kernel's time is at
    least that of its keys, and at least that of its pairs, but which of the two must be the same for all in it.
    """
    tokens = prices.token_ns * (demand.computed_N + demand.decodes_N) + prices.row_ns * (1 + demand.decodes_N)
    if demand.resumes:
        attended = prices.resumed_key_ns * (demand.prompt_keys_N + demand.decoded_keys_N)
    else:
        attended = prices.pair_ns * demand.pairs_N + prices.decode_key_ns * demand.decoded_keys_N
    return np.asarray(prices.kept * (tokens + attended))


def alone_first_ns(demand: Demand, prices: Prices) -> np.ndarray:
    """From its release to its first token, of each request alone, float64 [N]."""
    computed = demand.computed_N
    steps = -(-computed // prices.max_num_batched_tokens)
    attended = np.maximum(prices.resumed_key_ns * demand.prompt_keys_N, prices.pair_ns * demand.pairs_N)
    linears = prices.alone_linears_ns(computed, steps) + prices.coefficients.token_ns * computed
    return np.asarray(prices.kept * (prices.alone_step_ns * steps + linears + attended + prices.alone_row_ns))


def alone_last_ns(demand: Demand, prices: Prices) -> np.ndarray:
    """From its release to its last token, of each request alone, float64 [N]."""
    one = np.ones(1)
    step = prices.alone_step_ns + float(prices.alone_linears_ns(one, one)[0]) + prices.coefficients.token_ns
    key = prices.resumed_key_ns if demand.resumes else prices.decode_key_ns
    decoding = (step + prices.alone_row_ns) * demand.decodes_N + key * demand.decoded_keys_N
    return np.asarray(alone_first_ns(demand, prices) + prices.kept * decoding)


def shortest_remaining_first(release_N: np.ndarray, work_N: np.ndarray) -> np.ndarray:
    """When each job ends on one machine that always serves the one with the least work left, float64 [N]."""
    order = np.argsort(release_N, kind="stable")
    release, work = release_N[order].tolist(), work_N[order].tolist()
    ends = np.empty(len(release))
    left: list[tuple[float, int]] = []
    now, arriving = 0.0, 0
    while left or arriving < len(release):
        if not left:
            now = max(now, release[arriving])
        while arriving < len(release) and release[arriving] <= now:
            heappush(left, (work[arriving], arriving))
            arriving += 1
        until = release[arriving] if arriving < len(release) else float("inf")
        remaining, job = heappop(left)
        if now + remaining <= until:
            now += remaining
            ends[job] = now
        else:
            heappush(left, (remaining - (until - now), job))
            now = until
    result = np.empty(len(ends))
    result[order] = ends
    return result


def busy_until(release_N: np.ndarray, work_N: np.ndarray) -> float:
    """When one machine that never rests while there is work has done all of it."""
    now = 0.0
    for at in np.argsort(release_N, kind="stable").tolist():
        now = max(now, float(release_N[at])) + float(work_N[at])
    return now


class Bound(NamedTuple):
    """No schedule gives a value beyond `value` (below, for a latency; above, for a rate). `by` is what says so:
    work, or each request alone; `weak` marks bounds that know nothing of load."""

    value: float
    by: str
    weak: bool = False


def latency_bounds(
    name: str, demand: Demand, prices: Prices, work_N: np.ndarray, alone_N: np.ndarray
) -> dict[str, Bound]:
    """Seconds: the mean by work or alone, whichever is more; quantiles alone. Nothing for no requests."""
    if not len(demand):
        return {}
    around_N = demand.visible_N - demand.arrival_N + demand.delivery_N
    ends_N = shortest_remaining_first(demand.visible_N, work_N)
    by_work = float(np.mean(ends_N - demand.visible_N + around_N)) + prices.kept * prices.step_ns
    alone = alone_N + around_N
    mean = max(Bound(by_work / NS, "work"), Bound(float(alone.mean()) / NS, "alone"))
    quantiles = np.percentile(alone, QUANTILES)
    return {
        f"{name}/mean": mean,
        **{f"{name}/p{q}": Bound(float(v) / NS, "alone", True) for q, v in zip(QUANTILES, quantiles, strict=True)},
        f"{name}/max": Bound(float(alone.max()) / NS, "alone", True),
    }


def makespan_bound_ns(demand: Demand, prices: Prices, first_arrival_ns: float) -> float:
    """From the first arrival to the last token, at least."""
    by_work = busy_until(demand.visible_N, total_work_ns(demand, prices)) + prices.kept * prices.step_ns
    alone = float((demand.visible_N + alone_last_ns(demand, prices)).max())
    return max(by_work, alone) - first_arrival_ns


def bounds(
    ttft: Demand, e2e: Demand, prices: Prices, *, first_arrival_ns: float = 0.0, output_tokens: int, total_tokens: int
) -> dict[str, Bound]:
    """By summary key. `ttft` and `e2e`: the requests that enter these latencies; the throughputs are of all tokens."""
    found = {
        **latency_bounds("ttft", ttft, prices, prefill_work_ns(ttft, prices), alone_first_ns(ttft, prices)),
        **latency_bounds("e2e", e2e, prices, total_work_ns(e2e, prices), alone_last_ns(e2e, prices)),
    }
    if not len(e2e):
        return found
    seconds = makespan_bound_ns(e2e, prices, first_arrival_ns) / NS
    found["makespan_s"] = Bound(seconds, "work")
    rates = {"requests": len(e2e), "output_tokens": output_tokens, "total_tokens": total_tokens}
    for name, amount in rates.items():
        if seconds > 0:
            found[f"throughput/{name}_per_s"] = Bound(amount / seconds, "work")
    return found


def longest_shared(keys: np.ndarray, row: np.ndarray, widths: np.ndarray, rows: int) -> np.ndarray:
    """Tokens of each row's leading ids that some other row has too, int64 [rows].

    `keys`: one for each id, equal for equal prefixes; `row`: whose it is; `widths`: its tokens.
    """
    unique, place = np.unique(keys, return_inverse=True)
    first, last = np.full(len(unique), rows), np.full(len(unique), -1)
    np.minimum.at(first, place, row)
    np.maximum.at(last, place, row)
    shared = first[place] < last[place]
    return np.asarray(np.bincount(row[shared], weights=widths[shared], minlength=rows).astype(np.int64))


def tight(values: Sequence[float], found: Sequence[Bound], within: float = 0.1) -> int:
    """How many of `values` lie within a share `within` of their bounds."""
    return sum(
        abs(value / bound.value - 1) <= within for value, bound in zip(values, found, strict=True) if bound.value
    )
