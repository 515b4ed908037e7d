"""From measured steps to a cost profile: a robust fit of few non-negative rates, its held-out error, and its file.

A duration covers the step from one boundary to the next, the scheduler included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.cost.routing import DENSE, Routing
from schedlab.framework.errors import ConfigError

SCHEMA = "schedlab.cost_profile"
VERSION = 1
FOLDS = 5

RATES = (
    "step_ns", "request_ns", "prefill_ns", "prefill_step_ns", "decode_step_ns", "matrix_ns", "token_ns", "linear_ns",
    "head_ns", "row_ns", "pair_ns", "key_ns", "decode_key_ns", "copy_ns", "copied_byte_ns",
    "experts_ns",
)  # fmt: skip
"""The fitted coefficients. The time of the weights is part of `step_ns`: one model cannot tell them apart."""
LEAST_DEVIATION = 0.01
"""Steps that are off by so little are never taken for disturbed ones."""
COPY_RATES = ("idle_ns", "copy_ns", "copied_byte_ns")


class Point(NamedTuple):
    """One measured step."""

    work: Work
    duration_ns: int


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of a fit over steps it has not seen (5 folds; repeats of one work share a fold).

    `repeat_difference`: mean |a - b| / mean(a, b) over pairs of repeats of one work, the error that no model avoids;
    None without repeats.
    """

    held_out_mean: float
    held_out_p90: float
    repeat_difference: float | None
    num_points: int
    num_works: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Coefficients of one model on one machine, with the points they come from. `identity` says which.

    `measured_host`: the points are whole steps of an engine; otherwise they are the device's part of them alone.
    """

    identity: dict[str, Any]
    coefficients: Coefficients
    measured_copies: bool
    error: FitError
    points: tuple[Point, ...]
    measured_host: bool = True

    def coefficients_for(self, roofline: Roofline, hardware: Hardware) -> Coefficients:
        """The coefficients, if this profile is of that model, dtypes and machine; ConfigError otherwise.

        Copies come from the hardware's link where none were measured (`measured_copies`), and the host's time of a step
        and of a request from the hardware's constants where the device alone was (`measured_host`).
        """
        for key, expected in identity_of(roofline, hardware).items():
            if (found := self.identity.get(key)) != expected:
                raise ConfigError(f"profile: measured with {key} = {found}, this run has {expected}")
        rates, preset = self.coefficients, Coefficients.from_roofline(roofline, hardware)
        if not self.measured_copies:
            rates = replace(rates, **{name: getattr(preset, name) for name in COPY_RATES})
        if not self.measured_host:
            rates = replace(
                rates, step_ns=rates.step_ns + preset.host_ns, request_ns=rates.request_ns + preset.host_request_ns,
                host_ns=preset.host_ns, host_request_ns=preset.host_request_ns,
            )  # fmt: skip
        return rates

    def achieved(self, roofline: Roofline) -> dict[str, float]:
        """The rates as physics: FLOP/s and bytes/s that were reached, for reading; a rate of 0 is left out."""
        c, layers = self.coefficients, roofline.model.num_hidden_layers
        per_unit = {
            "linear_flops": (2 * layers * roofline.layer_elements, c.token_ns + c.linear_ns),
            "attention_flops": (4 * layers * roofline.q_size, c.pair_ns),
            "decode_kv_bytes_per_s": (roofline.kv_bytes_per_token, c.decode_key_ns),
            "copied_bytes_per_s": (1, c.copied_byte_ns),
        }
        return {name: units / ns * 1e9 for name, (units, ns) in per_unit.items() if ns}

    def save(self, path: str | Path) -> None:
        """Write as JSON: schema, version, coefficients, error, and the points as columns."""
        columns: dict[str, list[int]] = {name: [] for name in _WORK_FIELDS}
        for point in self.points:
            for name in _WORK_FIELDS:
                columns[name].append(getattr(point.work, name))
        content = {
            "schema": SCHEMA,
            "version": VERSION,
            "identity": self.identity,
            "coefficients": asdict(self.coefficients),
            "measured_copies": self.measured_copies,
            "measured_host": self.measured_host,
            "error": asdict(self.error),
            "points": {**columns, "duration_ns": [point.duration_ns for point in self.points]},
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote; ConfigError of one line for anything else."""
        content = _read(Path(path))
        try:
            points = content["points"]
            works = [Work(*row) for row in zip(*(points[name] for name in _WORK_FIELDS), strict=True)]
            return cls(
                content["identity"],
                Coefficients(**content["coefficients"]),
                content["measured_copies"],
                FitError(**content["error"]),
                tuple(Point(*row) for row in zip(works, points["duration_ns"], strict=True)),
                content.get("measured_host", True),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"profile {path}: incomplete or damaged: {type(error).__name__}: {error}") from None


_WORK_FIELDS = tuple(field.name for field in fields(Work))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"profile {path}: expected a readable file, found: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"profile {path}: expected JSON, found: {error}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ConfigError(f"profile {path}: expected a file written by schedlab calibrate")
    if content.get("version") != VERSION:
        found = content.get("version")
        raise ConfigError(f"profile {path}: expected version {VERSION}, found {found}; calibrate again")
    return content


def identity_of(roofline: Roofline, hardware: Hardware) -> dict[str, Any]:
    """What a profile is valid for: machine, dtypes, split and the model's shape."""
    model, windows = roofline.model, roofline.model.windows
    return {
        "hardware": hardware.name,
        "weight_dtype": roofline.weight_dtype,
        "kv_cache_dtype": roofline.kv_cache_dtype,
        "tensor_parallel": roofline.tensor_parallel,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        **_experts_of(roofline),
        "sliding_window": windows[0] if len(set(windows)) == 1 else list(windows),
    }


def _experts_of(roofline: Roofline) -> dict[str, Any]:
    """What tells a model of experts from others; nothing of a dense one, whose profiles say nothing of it."""
    model, routing = roofline.model, roofline.routing
    if not routing.num_experts:
        return {}
    sizes: dict[str, Any] = {
        "moe_intermediate_size": model.moe_intermediate_size,
        "shared": model.shared_intermediate_size,
    }
    if model.expert_dtype is not None:
        sizes["expert_dtype"] = model.expert_dtype
    if roofline.expert_parallel > 1:
        sizes["expert_parallel"] = roofline.expert_parallel
    return {"num_experts": routing.num_experts, "num_experts_per_tok": routing.chosen, **sizes}


def fit_profile(points: Sequence[Point], roofline: Roofline, hardware: Hardware) -> Profile:
    """Fit all `points`; the error is that of fits that left a fifth of the works out.

    ConfigError if the points do not contain what a profile must know: prefills and decodes, more works than rates.
    """
    check_points(points, roofline.routing)
    coefficients = fit(points, roofline.routing)
    copies = any(point.work.copied_bytes for point in points)
    return Profile(
        identity_of(roofline, hardware), coefficients, copies, cross_validate(points, roofline.routing), tuple(points)
    )


def check_points(points: Sequence[Point], routing: Routing = DENSE) -> None:
    """ConfigError if points lack what a profile must know: prefills and decodes, more works than rates."""
    works = {point.work for point in points}
    for name, what in (("prefill_pairs", "prefill"), ("decode_keys", "decode")):
        if not any(getattr(work, name) for work in works):
            raise ConfigError(f"profile: expected measured {what} steps, found none")
    needed = 2 * (len(RATES) if routing.num_experts else len(RATES) - 1)
    if len(works) < needed:
        raise ConfigError(f"profile: expected at least {needed} different steps, found {len(works)}")
    if impossible := [point for point in points if point.duration_ns <= 0]:
        raise ConfigError(f"profile: expected durations above 0 ns, found {impossible[0].duration_ns}")


def fit(points: Sequence[Point], routing: Routing = DENSE) -> Coefficients:
    """The rates, and the ridge of the linears, that fit the durations best.

    For each candidate ridge (0: a sum of floor and rate; else the hinge of a roofline) the rates are a robust
    non-negative least-squares problem; the ridge with the least loss is taken.
    """
    durations = np.array([point.duration_ns for point in points], dtype=float)
    amounts = np.array([astuple(point.work) for point in points], dtype=float)
    best_loss, best = np.inf, Coefficients()
    experts: dict[str, Any] = {
        "num_experts": routing.num_experts, "experts_per_token": routing.chosen, "routing_skew": routing.skew,
        "expert_devices": routing.devices, "expert_sources": routing.sources,
    }  # fmt: skip
    for ridge in _candidate_ridges(float(amounts[:, 0].max())):
        rates, loss = robust_rates(design_matrix(amounts, ridge, routing), durations)
        if loss < best_loss * (1 - 1e-9):
            best_loss = loss
            values: dict[str, Any] = dict(zip(RATES, map(float, rates), strict=True))
            best = Coefficients(linear_ridge=ridge, **values, **experts)
    return best


def _candidate_ridges(most_tokens: float) -> list[float]:
    """0 and a geometric grid of quarter octaves inside the measured range."""
    return [0.0, *map(float, 2.0 ** np.arange(0, np.log2(max(most_tokens, 2.0)), 0.25))]


def design_matrix(amounts: np.ndarray, ridge: float, routing: Routing = DENSE) -> np.ndarray:
    """float64 [points, rates]: what each rate is multiplied by, in the order of `RATES`.

    `amounts` is float64 [points, fields of `Work`].
    """
    tokens, rows, decodes, prefills, pairs, keys, decode_keys, copied = amounts.T
    beyond = np.maximum(tokens - ridge, 0.0)
    factors = (
        tokens > 0, decodes + prefills, prefills, prefills > 0, decodes > 0, tokens > 1, tokens, beyond, rows > 0, rows,
        pairs, keys, decode_keys, copied > 0, copied, routing.distinct_of(tokens) / max(routing.num_experts, 1),
    )  # fmt: skip
    return np.stack(factors, axis=1).astype(float)


def robust_rates(
    design: np.ndarray, durations: np.ndarray, rounds: int = 15, k: float = 2.0
) -> tuple[np.ndarray, float]:
    """Non-negative rates under which each kind of step lasts as long as it did on average, and how far steps are off.

    The residuals are relative to the *modelled* duration, as deviations grow with it (quasi-likelihood: McCullagh,
    Nelder, Generalized Linear Models, 1989, chapter 9). Relative to the measured one, short steps would count for more
    than long ones, and the kinds of steps that are disturbed most would be modelled as too short. Beyond `k` robust
    standard deviations a residual counts linearly (Huber, Robust Statistics, 1981). The loss is the mean |log ratio|.
    """
    weights, modelled = np.ones(len(durations)), durations
    for _ in range(rounds):
        root = np.sqrt(weights) / modelled
        rates = nonnegative_least_squares(design * root[:, None], durations * root)
        before, modelled = modelled, np.maximum(design @ rates, 1e-3 * durations)
        if np.max(np.abs(modelled / before - 1)) < 1e-4:
            break
        residuals = np.abs(durations / modelled - 1)
        limit = k * max(1.4826 * float(np.median(residuals)), LEAST_DEVIATION)
        weights = np.minimum(1.0, limit / np.maximum(residuals, 1e-300))
    return rates, float(np.mean(np.abs(np.log(durations / modelled))))


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 of least |a x - b| (Lawson, Hanson: Solving Least Squares Problems, 1974, algorithm 23.10).

    On the normal equations, as columns are few and rows are many (Bro, De Jong, J. Chemometrics 11, 1997).
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    gram, projected = a.T @ a, a.T @ b
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    tolerance = 1e-10 * float(np.linalg.norm(b))
    for _ in range(3 * a.shape[1]):
        gradient = np.where(free, -np.inf, projected - gram @ x)
        entering = int(np.argmax(gradient))
        if gradient[entering] <= tolerance:
            break
        free[entering] = True
        while True:
            target = np.zeros_like(x)
            target[free] = np.linalg.lstsq(gram[np.ix_(free, free)], projected[free], rcond=None)[0]
            blocked = free & (target <= 0)
            if not blocked.any():
                break
            step = np.min(x[blocked] / np.maximum(x[blocked] - target[blocked], 1e-300))
            x = x + step * (target - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = target
    return np.asarray(x / scale)


def predict_ns(coefficients: Coefficients, points: Sequence[Point]) -> np.ndarray:
    """float64 [points]: modelled durations."""
    return np.array([coefficients.total_ns(point.work) for point in points])


def cross_validate(points: Sequence[Point], routing: Routing = DENSE) -> FitError:
    """Errors over held-out works, each left out once; repeats of a work are left out together."""
    order = {work: i for i, work in enumerate(dict.fromkeys(point.work for point in points))}
    folds = np.array([order[point.work] % FOLDS for point in points])
    errors = np.empty(len(points))
    for fold in range(FOLDS):
        held = [point for point, f in zip(points, folds, strict=True) if f == fold]
        fitted = fit([point for point, f in zip(points, folds, strict=True) if f != fold], routing)
        truth = np.array([point.duration_ns for point in held], dtype=float)
        errors[folds == fold] = np.abs(predict_ns(fitted, held) / truth - 1.0)
    return FitError(
        float(np.mean(errors)), float(np.quantile(errors, 0.9)), repeat_difference(points), len(points), len(order)
    )


def repeat_difference(points: Sequence[Point]) -> float | None:
    """Mean relative difference of successive repeats of the same work; None if no work was repeated."""
    last: dict[Work, int] = {}
    differences = []
    for work, duration in points:
        if work in last:
            differences.append(2 * abs(duration - last[work]) / (duration + last[work]))
        last[work] = duration
    return float(np.mean(differences)) if differences else None
