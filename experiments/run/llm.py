"""`schedlab.LLM`: prompts in, text out, over the same engine and policies that experiments run.

A call's clock is the wall; times are the consumer's: a request arrives when it is handed over, its tokenising is
preparation, and a token has come when the consumer has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from schedlab.experiments import engines
from schedlab.experiments.engines import EngineSetup
from schedlab.experiments.run.manifest import describe_run, workload_facts, write_manifest
from schedlab.experiments.run.offered import Counted, Logged
from schedlab.experiments.run.text import answer_text, generated
from schedlab.framework.content import TokenContent
from schedlab.framework.engine import Engine
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.tokenizer import Messages, TextStream, Tokenizer
from schedlab.framework.policy import Policy
from schedlab.framework.request import NS, SLO, EngineRequest, SamplingParams
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.rows import StepRow
from schedlab.framework.results.tables import RunTables
from schedlab.framework.results.writer import RunWriter
from schedlab.framework.source import ListSource
from schedlab.workloads.readers import read

Prompt = str | Sequence[int] | Messages
"""Text, token ids, or a conversation for the chat template."""
ALIVE = ("waiting", "running", "preempted", "swapped")


@dataclass(frozen=True, slots=True)
class Generation:
    """What became of one prompt.

    `finish_reason` is stop, length, failed or rejected. `stop_reason` is the stop string or the stop token's id that
    ended it (None for the end-of-text token), or why it failed. `token_ids` include what ended it, `text` does not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Piece:
    """News of the prompt `index`: tokens, the text that they made certain, and when the consumer had them.

    `time_s` is seconds on the engine's clock. The last piece of a prompt has a `finish_reason` and a `stop_reason`, as
    in `Generation`.
    """

    index: int
    request_id: str
    text: str | None
    token_ids: tuple[int, ...]
    time_s: float
    finish_reason: str | None
    stop_reason: str | int | None


class LLM:
    """A model behind an engine: `LLM("smollm2").generate("Once upon a time", SamplingParams(max_tokens=32))`.

    model     : a preset's name, a directory (any name with a slash), a mapping of model keys, or a finished EngineSetup
    engine    : cpu or cuda; `keys` are its arguments (dtype, num_threads, max_num_seqs, num_blocks, …)
    policy    : ChunkedPrefill unless given
    tokenizer : a directory, where the model brings no tokenizer or another is wanted
    out       : a directory to record all calls in as one run, complete when `close` is called or the `with` ends
    store_text: keep generated texts beside the token ids of the run's outputs
    """

    def __init__(
        self,
        model: str | Mapping[str, Any] | EngineSetup,
        *,
        engine: str = "cpu",
        policy: Policy | None = None,
        tokenizer: str | Path | None = None,
        out: str | Path | None = None,
        store_text: bool = False,
        slo: SLO | None = None,
        **keys: Any,
    ) -> None:
        setup = model if isinstance(model, EngineSetup) else _setup(engine, model, keys)
        clock = setup.clock("wall")
        directory = tokenizer or setup.path
        self.tokenizer = None if directory is None else Tokenizer(directory, setup.executor.vocab_size)
        self._policy = policy or _default_policy()
        self._setup = setup
        self._out = None if out is None else Path(out)
        self._inbox = Inbox()
        self._recorder, self._source = self._outputs(slo, store_text)
        self._engine = Engine(self._policy, setup.executor, self._source, setup.config, clock, self._recorder)
        self._submitted = 0
        self._result: RunTables | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> list[Generation]:
        """What the model makes of each prompt, in their order. `chat` puts text prompts into the chat template.

        `sampling_params` are those of all prompts, or one each. A prompt that fails does so alone.
        """
        answers = self._submit(prompts, sampling_params, chat)
        for _ in self._pieces(answers):
            pass
        return [answer.generation(self._engine) for answer in answers]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> Iterator[Piece]:
        """The same, piece by piece as tokens come. Prompts are handed over when the first piece is asked for.

        The engine works while the consumer waits for the next piece; one that stops early withdraws what is unfinished.
        """
        yield from self._pieces(self._submit(prompts, sampling_params, chat))

    # ---- requests ----

    def _submit(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None, chat: bool
    ) -> list[TextAnswer]:
        each = [prompts] if _is_one(prompts) else list(prompts)
        given = sampling_params or SamplingParams()
        params = [given] * len(each) if isinstance(given, SamplingParams) else list(given)
        if len(params) != len(each):
            raise ConfigError(f"sampling_params: expected one, or {len(each)} for as many prompts, found {len(params)}")
        arrival_ns = self._engine.now_ns
        made = [self._answer(i, prompt, params[i], chat, arrival_ns) for i, prompt in enumerate(each)]
        self._inbox.requests += [answer.request for answer in made]
        for request in self._source.pop(self._engine.now_ns):
            self._engine.submit(request)
        return made

    def _answer(self, index: int, prompt: Prompt, params: SamplingParams, chat: bool, arrival_ns: int) -> TextAnswer:
        token_ids = self._encode(prompt, chat)
        if params.stop and self.tokenizer is None:
            raise ConfigError("sampling.stop: expected a model with a tokenizer, found one with none")
        request = EngineRequest(
            str(self._submitted), arrival_ns, len(token_ids), TokenContent(token_ids), max_tokens=params.max_tokens,
            sampling=params, source_row=self._submitted, visible_ns=self._engine.now_ns,
        )  # fmt: skip
        self._submitted += 1
        stream = None if self.tokenizer is None else TextStream(self.tokenizer, params.stop)
        return TextAnswer(index, request, prompt if isinstance(prompt, str) else None, stream)

    def _encode(self, prompt: Prompt, chat: bool) -> list[int]:
        is_text = isinstance(prompt, str) or (
            isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)
        )
        if not is_text:
            return self._checked(list(cast(Sequence[int], prompt)) if isinstance(prompt, Iterable) else [prompt])
        if self.tokenizer is None:
            raise ConfigError(
                "prompt: expected token ids, as this model has no tokenizer (model=smollm2 has); found text"
            )
        return self.tokenizer.encode(cast(str | Messages, prompt), chat)

    def _checked(self, token_ids: list[Any]) -> list[int]:
        vocab_size = self._setup.executor.vocab_size
        for token in token_ids:
            if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
                raise ConfigError(f"prompt: expected token ids from 0 to {vocab_size - 1}, found {token!r}")
        return [int(token) for token in token_ids]

    # ---- running ----

    def _pieces(self, answers: Sequence[TextAnswer]) -> Iterator[Piece]:
        """Step until all of `answers` are complete, handing over what is new after each step."""
        pending = list(answers)
        try:
            while pending:
                for answer in pending:
                    piece = answer.news(self._engine)
                    if answer.finish_reason is not None:
                        self._recorder.delivered(answer.request, answer.stamps_ns)
                    if piece is not None:
                        yield piece
                pending = [answer for answer in pending if answer.finish_reason is None]
                if pending:
                    self._engine.step()
        except GeneratorExit:
            self._withdraw([answer for answer in pending if answer.finish_reason is None])
            raise

    def _withdraw(self, answers: Sequence[TextAnswer]) -> None:
        if not answers:
            return
        for answer in answers:
            self._engine.abort(answer.request.request_id)
        self._engine.step()  # a withdrawal is due at the next boundary
        for answer in answers:
            self._recorder.delivered(answer.request, answer.stamps_ns)

    # ---- recording ----

    def _outputs(self, slo: SLO | None, store_text: bool) -> tuple[Unrecorded | AtClient, Counted]:
        if self._out is None:
            return Unrecorded(Measurement(1, 1)), Counted(self._inbox, 0)
        config, tokenizer = self._setup.config, self.tokenizer
        measurement = Measurement(config.max_num_seqs, config.num_blocks, slo, at_client=True)
        text = (lambda request: answer_text(tokenizer, request)) if store_text and tokenizer is not None else None
        recorder = AtClient(self._out, measurement)
        return recorder, Logged(self._inbox, 0, self._out, text)

    def close(self) -> RunTables | None:
        """Give back the KV memory and end the recorded run: its tables, or None without `out`."""
        if self._out is not None and isinstance(self._recorder, AtClient) and self._result is None:
            self._source.__exit__(None, None, None)
            self._result = self._recorder.close(backlog_end=self._engine.num_unfinished, counters={})
            self._result.manifest = self._manifest(self._out)
            write_manifest(self._out, self._result.manifest)
        self._engine.close()
        return self._result

    def _manifest(self, directory: Path) -> dict[str, Any]:
        own = {"policy": type(self._policy).__name__, "workload": "live", "engine": self._setup.name}
        return describe_run(
            config={**own, "limits": asdict(self._setup.config)},
            labels=own,
            overrides={},
            seeds={},
            policy=self._policy,
            predictor=None,
            workload=workload_facts(read(directory, "offered").with_columns(name="live")),
            engine=asdict(self._setup.config),
            clock="wall",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        if isinstance(self._recorder, AtClient):
            self._source.__exit__(kind, error, None)
            self._recorder.fail(error)
        self._engine.close()


def _setup(engine: str, model: str | Mapping[str, Any], keys: Mapping[str, Any]) -> EngineSetup:
    makers: dict[str, Callable[..., EngineSetup]] = {"cpu": engines.cpu, "cuda": engines.cuda}
    if engine not in makers:
        raise ConfigError(f"engine={engine}: expected {' or '.join(makers)}, which generate text")
    return makers[engine](model, **keys)


def _default_policy() -> Policy:
    from schedlab.policies.chunked_prefill import ChunkedPrefill

    return ChunkedPrefill()


def _is_one(prompts: Any) -> bool:
    """One prompt: text, token ids or a conversation, not a list of these."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (Integral, Mapping)))


class Inbox(ListSource):
    """Requests that callers have handed over; they are due at once, and the caller submits them."""

    def __init__(self) -> None:
        super().__init__([])
        self.requests: list[EngineRequest] = []

    def pop(self, now_ns: int) -> list[EngineRequest]:
        due, self.requests = self.requests, []
        return due


class TextAnswer:
    """One prompt on its way: what its consumer has had so far, and when."""

    def __init__(self, index: int, request: EngineRequest, prompt: str | None, stream: TextStream | None) -> None:
        self.index = index
        self.request = request
        self.prompt = prompt
        self.stream = stream
        self.stamps_ns: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def news(self, engine: Engine) -> Piece | None:
        """What has come since the last call, handed over now; ends the request where its text meets a stop string."""
        token_ids = generated(engine, self.request, len(self.stamps_ns))
        if not token_ids and self.request.state in ALIVE:
            return None
        text = self._read(token_ids)
        if self.stream is not None and self.stream.stopped_by is not None and self.request.state in ALIVE:
            engine.finish(self.request, "finished", engine.now_ns)
        if self.request.state not in ALIVE:
            self.finish_reason, self.stop_reason = self._ending(engine)
        now_ns = engine.now_ns
        self.stamps_ns += [now_ns] * len(token_ids)
        return Piece(
            self.index, self.request.request_id, text, tuple(token_ids), now_ns / NS,
            self.finish_reason, self.stop_reason,
        )  # fmt: skip

    def _read(self, token_ids: Sequence[int]) -> str | None:
        if self.stream is None:
            return None
        params = self.request.sampling
        assert params is not None
        text = "".join(self.stream.push(token) for token in token_ids if token not in params.stop_token_ids)
        return text if self.request.state in ALIVE else text + self.stream.end()

    def _ending(self, engine: Engine) -> tuple[str, str | int | None]:
        request, params = self.request, self.request.sampling
        assert params is not None
        if self.stream is not None and self.stream.stopped_by is not None:
            return "stop", self.stream.stopped_by
        if request.state not in ("finished", "length_capped"):
            return request.state, request.reason
        last = request.output_token_ids[-1]
        if last in params.stop_token_ids:
            return "stop", last
        if last in engine.executor.eos_token_ids and not params.ignore_eos:
            return "stop", None
        return "length", None

    def generation(self, engine: Engine) -> Generation:
        assert self.finish_reason is not None
        request = self.request
        prompt_ids = request.content.tokens(request.num_prompt_tokens, engine.executor.vocab_size)
        text = None if self.stream is None else self.stream.text
        return Generation(
            request.request_id, self.prompt, tuple(prompt_ids.tolist()), text, tuple(request.output_token_ids),
            self.finish_reason, self.stop_reason,
        )  # fmt: skip


class AtClient(RunWriter):
    """A run directory whose times are a consumer's: `first_token_s` and `finished_s` are when it had the tokens."""

    def gap(self, gap_ns: int, count: int) -> None:
        """The engine's gaps are not what the consumer saw."""

    def request(self, request: EngineRequest) -> None:
        """The engine is done with it; its row waits for `delivered`."""

    def delivered(self, request: EngineRequest, stamps_ns: Sequence[int]) -> None:
        """The consumer has had all that it will have of `request`: its tokens, at these times."""
        request.see_at_client(stamps_ns[0] if stamps_ns else None)
        if stamps_ns and request.state in ("finished", "length_capped"):
            request.finished_ns = stamps_ns[-1]
        for earlier, later in pairwise(stamps_ns):
            super().gap(later - earlier, 1)
        super().request(request)


class Unrecorded(Recorder):
    """Keeps nothing, for as long as it may run."""

    def step(self, row: StepRow, free_block_ns: int | None = None, free_blocks_min: int | None = None) -> None:
        pass

    def decision(self, *row: Any, **more: Any) -> None:
        pass

    def decode_all(self, index: int, now_ns: int, repeat: int = 1) -> None:
        pass

    def gap(self, gap_ns: int, count: int) -> None:
        pass

    def request(self, request: EngineRequest) -> None:
        pass

    def delivered(self, request: EngineRequest, stamps_ns: Sequence[int]) -> None:
        pass
