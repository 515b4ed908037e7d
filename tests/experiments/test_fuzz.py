"""Whatever an override says, a command ends with a line and never with a traceback; so does whatever a file holds."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from omegaconf import DictConfig

from schedlab.experiments.run.compose import compose

BASE = ("engine=virtual", "model=llama3.1-8b", "hardware=h100", "workload=poisson", "wandb.mode=disabled",
        "plots=false", "progress=false", "timeline=0", "hydra.run.dir=a")  # fmt: skip
FEW = ("workload.num_requests", "workload.num_sessions", "workload.max_requests")
"""Of these, a workload's first is 4."""
OPTIONS = {
    "workload": ("poisson", "conversations", "mixture", "closed_loop", "sample", "shared_prefix", "offline", "bursty"),
    "policy": ("fcfs", "chunked_prefill", "slo_aware", "fair", "shedding", "multilevel_feedback", "program_las"),
    "predictor": ("none", "oracle"),
    "slo": ("default", "none"),
    "serving": ("none", "vllm_async"),
}
VALUES = (
    "inf", "-inf", "nan", "0", "-1", "1", "0.5", "2147483648", "9223372036854775808", "-9223372036854775809", "1e300",
    "1e-300", "true", "null", "''", "text", "é", "[]", "[1,2]", "[inf]", "[null]", "{}", "{a:1}",
    "{_target_:os.getcwd}", "{_target_:schedlab.policies.fcfs.FCFS}", "[[1,2],[3,4]]", "'a b'", "'$\\foo{$'",
    "${seed}", "${no_such}", "???",
)  # fmt: skip
NAMED = (
    "slo.e2e_s=inf", "hardware.scheduler_request_us=2147483648", "workload.slo_classes=-inf", "+objective.figures=inf",
    "workload.lengths=inf", "policy=[1,2]", "~predictor=2147483648", "hardware.scheduler_us=1e300",
)  # fmt: skip
PATIENCE_S = 10
"""An override may ask for a long run; after so long it is interrupted, as by Ctrl-C."""


def leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """The keys of a config, those of inner nodes too."""
    for key in map(str, node):
        yield prefix + key
        inner = node._get_node(key)
        if isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_interpolation():
            yield from leaves(inner, f"{prefix}{key}.")


def words(rng: random.Random) -> list[str]:
    """An option or two, and one to three values at random places."""
    chosen = [f"{group}={rng.choice(OPTIONS[group])}" for group in rng.sample([*OPTIONS], rng.randrange(3))]
    keys = [*leaves(compose([*BASE, *chosen]))]
    few = [f"{key}=4" for key in FEW if key in keys][:1]
    return [*chosen, *few, *(override(rng, rng.choice(keys)) for _ in range(rng.choice((1, 1, 1, 2, 3))))]


def override(rng: random.Random, key: str) -> str:
    value, kind = rng.choice(VALUES), rng.random()
    if kind < 0.05:
        return f"~{key}" if kind < 0.025 else f"~{key}={value}"
    return f"{'++' * (kind > 0.95)}{key}={value}" if kind < 0.97 else f"+{key}.new={value}"


@contextmanager
def patience() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(schedlab, given):
    with patience():
        done = schedlab("run", *BASE, *given)
    assert done.code in (0, 1, 2, 130) and "Traceback" not in done.err, (given, done.err)
    assert done.code != 2 or done.err.count("\n") == 1, (given, done.err)


@pytest.mark.parametrize("given", NAMED)
def test_overrides_that_gave_tracebacks(schedlab, given):
    check(schedlab, ["workload.num_requests=4", given])
