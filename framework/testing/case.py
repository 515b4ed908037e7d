"""What a property is tried on: the policy under test, and one trace with the engine's limits for it.

Knows how to run them on the stub and whose fault a failure is; knows no property.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from schedlab.framework.engine import Engine
from schedlab.framework.errors import PolicyStalled, SchedlabError
from schedlab.framework.executor import Executor
from schedlab.framework.policy import Policy
from schedlab.framework.request import EngineRequest
from schedlab.framework.testing.harness import Outcome, Spec, run

OURS = "schedlab.framework."


class Violation(AssertionError):
    """A policy does not have the property of this name; `what` is one line on what it did."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name
        self.what = what


@dataclass(frozen=True)
class Case:
    """`trace` in order of arrival; `engine` has the limits that differ from those of `harness.TINY`."""

    trace: tuple[Spec, ...]
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """Requests and tokens: the smaller, the easier to understand."""
        return len(self.trace), sum(spec.prompt + spec.output for spec in self.trace)

    def literal(self, indent: str = "") -> str:
        """Python that builds it, with what is not a default."""
        rows = [f"{indent}        {spec_literal(spec)},\n" for spec in self.trace]
        keys = ", ".join(f"{key!r}: {value!r}" for key, value in self.engine.items())
        return f"Case(\n{indent}    trace=(\n{''.join(rows)}{indent}    ),\n{indent}    engine={{{keys}}},\n{indent})"


def spec_literal(spec: Spec) -> str:
    """`Spec('r0', arrival_ns=0, …)`, without what is a default."""
    changed = [(f.name, getattr(spec, f.name)) for f in fields(spec) if getattr(spec, f.name) != f.default]
    return f"Spec({', '.join(f'{name}={value!r}' for name, value in changed)})"


class Guess:
    """Predicts half the length of some answers, twice that of others and that of the rest: a policy must bear both."""

    def predict(self, request: EngineRequest) -> int:
        recorded = request.recorded_output_tokens
        length = request.max_tokens if recorded is None else recorded
        return max(1, (length // 2, length, 2 * length)[request.num_prompt_tokens % 3])

    def observe(self, request: EngineRequest) -> None:
        pass


@dataclass(frozen=True)
class Subject:
    """The policy under test: `make` gives a fresh one for each run.

    `source` is Python that defines a function `make`, for programs that reproduce a failure; None: from the class.
    """

    make: Callable[[], Policy]
    source: str | None = None

    @property
    def name(self) -> str:
        return type(self.make()).__name__

    def run(
        self,
        case: Case,
        *,
        policy: Policy | None = None,
        executor: Executor | None = None,
        kind: type[EngineRequest] = EngineRequest,
        on_step: Callable[[Engine], None] | None = None,
        **changes: Any,
    ) -> Outcome:
        """The case to its end, audited at every step. Violation of `rules`, `stalls` or `audit`.

        A policy that does not ask for predictions gets some in every other case.
        """
        policy = policy or self.make()
        predicted = policy.needs_prediction or len(case.trace) % 2 == 0
        with blame():
            return run(
                policy,
                case.trace,
                executor=executor,
                predictor=Guess() if predicted else None,
                kind=kind,
                on_step=on_step,
                **{**case.engine, **changes},
            )


@contextmanager
def blame() -> Iterator[None]:
    """Turn whatever an engine raises into a violation of the property that it speaks of."""
    try:
        yield
    except Violation:
        raise
    except PolicyStalled as error:
        raise Violation("stalls", str(error)) from error
    except SchedlabError as error:
        raise Violation("rules", str(error)) from error
    except AssertionError as error:
        raise Violation("audit" if _is_ours(error) else "rules", _one_line(error)) from error
    except Exception as error:  # what a policy raises is a SchedlabError by now: the books were tampered with
        raise Violation("audit", f"the engine broke: {type(error).__name__}: {_one_line(error)}") from error


def _is_ours(error: BaseException) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith(OURS)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
