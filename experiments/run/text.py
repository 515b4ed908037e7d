"""Generated text during and after a run: the tokens so far, stop strings, and a request's text."""

from __future__ import annotations

from schedlab.framework.engine import Engine
from schedlab.framework.model.tokenizer import TextStream, Tokenizer
from schedlab.framework.request import EngineRequest


def generated(engine: Engine, request: EngineRequest, start: int = 0) -> list[int]:
    """Token ids that `request` has generated so far, from the `start`-th on, wherever it is."""
    if request.slot < 0 or engine.columns is None:
        return request.output_token_ids[start:]
    row = engine.columns.tokens[request.slot]
    return list(row[request.num_prompt_tokens + start : request.num_tokens].tolist())


def answer_text(tokenizer: Tokenizer, request: EngineRequest) -> str:
    """The text of an ended request, up to what stopped it."""
    params = request.sampling
    token_ids = request.output_token_ids
    if params is not None and token_ids and token_ids[-1] in params.stop_token_ids:
        token_ids = token_ids[:-1]
    text = tokenizer.decode(token_ids)
    found = [text.find(stop) for stop in (params.stop if params is not None else ())]
    return text[: min((at for at in found if at >= 0), default=len(text))]


class StopStrings:
    """Ends live requests whose text contains one of their stop strings; to be called after every step."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[EngineRequest, tuple[TextStream, int]] = {}

    def __call__(self, engine: Engine) -> None:
        watched = {r: self._streams.get(r) for r in engine.ledger.running if r.sampling is not None and r.sampling.stop}
        self._streams = {r: s for r, s in self._streams.items() if r in watched or r.state in ("preempted", "swapped")}
        for request, known in watched.items():
            assert request.sampling is not None
            stream, have = known or (TextStream(self._tokenizer, request.sampling.stop), 0)
            new = generated(engine, request, have)
            for token in new:
                stream.push(token)
            self._streams[request] = stream, have + len(new)
            if stream.stopped_by is not None and request.recorded_output_tokens is None:
                engine.finish(request, "finished", engine.now_ns)
                del self._streams[request]
