"""A tiny engine on the stub, audited after every boundary, and the tokens that it must produce whatever the policy
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from schedlab.framework.clock import VirtualClock
from schedlab.framework.content import Content, IdContent, SessionContent, TokenContent, UniqueContent
from schedlab.framework.engine import Engine
from schedlab.framework.executor import Executor
from schedlab.framework.limits import EngineConfig
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import MaxPredictor, Predictor
from schedlab.framework.request import SLO, EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource, Source
from schedlab.framework.stub import StubExecutor, chain_values, mix, start_value


@dataclass(frozen=True)
class Spec:
    """One request of a test trace, immutable, so that every run gets fresh `EngineRequest`s. Times in ns."""

    name: str
    arrival_ns: int
    prompt: int
    output: int
    ids: tuple[int, ...] | None = None
    id_width: int = 8
    session: str | None = None
    abort_ns: int | None = None
    priority: int = 0
    client: str = "default"
    live: bool = False
    deadline_ns: int | None = None
    slo: SLO | None = None

    def content(self) -> Content:
        if self.ids is not None:
            return IdContent(self.ids, self.id_width)
        if self.session is not None:
            return SessionContent(self.session)
        return UniqueContent(int.from_bytes(self.name.encode(), "little"))

    def request(self, kind: type[EngineRequest] = EngineRequest) -> EngineRequest:
        return kind(
            self.name,
            self.arrival_ns,
            self.prompt,
            self.content(),
            recorded_output_tokens=None if self.live else self.output,
            max_tokens=self.output if self.live else None,
            client=self.client,
            priority=self.priority,
            deadline_ns=self.deadline_ns,
            session=self.session,
            slo=self.slo,
            abort_ns=self.abort_ns,
            source_row=None,
        )


TINY = EngineConfig(
    num_blocks=24, max_model_len=256, max_num_seqs=6, max_num_batched_tokens=32, block_size=4, audit_every=1
)


@dataclass
class Outcome:
    """What a run left behind."""

    engine: Engine
    requests: list[EngineRequest]
    tables: Any = None
    by_name: dict[str, EngineRequest] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return str(self.tables.result["digest"])

    @property
    def streams(self) -> dict[str, list[int]]:
        return {request.request_id: request.output_token_ids for request in self.requests}

    @property
    def stamps(self) -> list[tuple[object, ...]]:
        """Everything about each request that must not depend on how a decision is executed."""
        return [
            (
                r.request_id,
                r.state,
                r.first_scheduled_ns,
                r.first_token_ns,
                r.finished_ns,
                r.num_preemptions,
                r.cached_tokens,
            )
            for r in self.requests
        ]


def engine_for(
    policy: Policy,
    source: Source,
    config: EngineConfig,
    executor: Executor | None = None,
    predictor: Predictor | None = None,
) -> Engine:
    """An engine on the stub (or another executor) and the virtual clock, with a recorder of its own.

    A policy that needs predictions gets the worst case unless told otherwise.
    """
    recorder = Recorder(Measurement(max_num_seqs=config.max_num_seqs, num_blocks=config.num_blocks))
    predictor = predictor or (MaxPredictor() if policy.needs_prediction else None)
    return Engine(policy, executor or StubExecutor(), source, config, VirtualClock(), recorder, predictor)


def run(
    policy: Policy,
    specs: Sequence[Spec],
    config: EngineConfig = TINY,
    executor: Executor | None = None,
    *,
    audited: bool = True,
    predictor: Predictor | None = None,
    kind: type[EngineRequest] = EngineRequest,
    on_step: Callable[[Engine], None] | None = None,
    **changes: Any,
) -> Outcome:
    """Run `specs` to the end under `policy` (on the stub by default), audited at every boundary unless told
    otherwise. `on_step` is called after every boundary; `kind` is the class of the requests.
    """
    config = replace(config, **changes)
    if not audited:
        config = replace(config, audit_every=1 << 60)
    requests = [spec.request(kind) for spec in sorted(specs, key=lambda spec: spec.arrival_ns)]
    engine = engine_for(policy, ListSource(requests), config, executor, predictor)
    engine.run(on_step)
    if audited:
        engine.audit()
        assert engine.ledger.cache.num_free == config.num_blocks, "a finished run still owns blocks"
    return close(engine, requests)


def close(engine: Engine, requests: list[EngineRequest]) -> Outcome:
    """What `engine` leaves behind as it is now."""
    tables = engine.recorder.close(backlog_end=engine.num_unfinished, counters={})
    return Outcome(engine, requests, tables, {request.request_id: request for request in requests})


def expected_stream(prompt_T: np.ndarray, count: int, vocab_size: int = 1000) -> list[int]:
    """What the stub generates after `prompt_T`, computed without an engine."""
    value = chain_values(start_value(), prompt_T)[-1]
    stream = []
    for _ in range(count):
        token = int(mix(np.array([value]))[0] % np.uint64(vocab_size))
        stream.append(token)
        value = chain_values(value, np.array([token]))[-1]
    return stream


def check_streams(outcome: Outcome) -> None:
    """Every request generated what it must, as far as it came; every replay that finished came to its end."""
    for request in outcome.requests:
        got = request.output_token_ids
        prompt = request.content.tokens(request.num_prompt_tokens, outcome.engine.executor.vocab_size)
        assert got == expected_stream(prompt, len(got)), f"{request} generated other tokens"
        if request.state == "finished" and request.recorded_output_tokens is not None:
            assert len(got) == request.recorded_output_tokens, f"{request} has the wrong length"


def same_tokens(make_policies: Sequence[Callable[[], Policy]], specs: Sequence[Spec], **changes: Any) -> list[Outcome]:
    """Run every policy on the same trace and check each stream against the reference."""
    outcomes = [run(make(), specs, **changes) for make in make_policies]
    for outcome in outcomes:
        check_streams(outcome)
    return outcomes


__all__ = ["TINY", "Outcome", "Spec", "TokenContent", "check_streams", "expected_stream", "run", "same_tokens"]
