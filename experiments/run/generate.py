"""`schedlab generate "prompt" …`: text from a model on the terminal, as it comes."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig

from schedlab.experiments.run import compose
from schedlab.experiments.run.checks import check_arguments
from schedlab.experiments.run.llm import LLM, Piece
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SamplingParams

_FLAG, _OVERRIDE = re.compile("-"), re.compile(r"[~+]|[\w./@:]+=")


def generate(words: Sequence[str]) -> None:
    """The first word is a prompt, unless it is an option; so is every other that reads like neither."""
    prompts = [w for i, w in enumerate(words) if not (_FLAG.match(w) or (i and _OVERRIDE.match(w)))]
    rest = [w for w in words if w not in prompts]

    def task(config: DictConfig) -> None:
        answer(config, prompts)

    compose.run_with_overrides(task, rest, "generate", "generate")


def answer(config: DictConfig, prompts: Sequence[str]) -> None:
    """Stream the answer to one prompt, or print those of several, each when it is complete."""
    if not prompts:
        raise ConfigError('generate: expected a prompt, as in: schedlab generate "Once upon a time" model=smollm2')
    params = sampling_params(compose.resolve(config.sampling))
    setup, policy = compose.build(config.engine, "engine"), compose.build(config.policy, "policy")
    slo = compose.build_optional(config.slo, "slo")
    seen: list[Piece] = []
    with LLM(setup, policy=policy, out=config.out, store_text=True, slo=slo) as llm:
        pieces = noted(llm.stream(prompts, params, chat=config.chat), seen)
        show_one(pieces) if len(prompts) == 1 else show_all(pieces, prompts)
    print(speed(seen), file=sys.stderr)
    if not config.chat and llm.tokenizer is not None and llm.tokenizer.has_chat_template and ends_at_once(seen):
        print("hint: the model ended at once; it has a chat template, which chat=true puts prompts in", file=sys.stderr)


def sampling_params(keys: dict[str, Any]) -> SamplingParams:
    check_arguments("sampling", keys, SamplingParams)
    given: dict[str, Any] = {key: tuple(value) if type(value) is list else value for key, value in keys.items()}
    return SamplingParams(**given)


def noted(pieces: Iterable[Piece], seen: list[Piece]) -> Iterator[Piece]:
    """The pieces, kept in `seen`. ConfigError for a prompt that failed or can never fit."""
    for piece in pieces:
        if piece.finish_reason in ("failed", "rejected"):
            raise ConfigError(f"prompt {piece.index + 1} {piece.finish_reason}: {piece.stop_reason}")
        seen.append(piece)
        yield piece


def ends_at_once(pieces: Iterable[Piece]) -> bool:
    """Whether the model, by its end-of-text token, ended an answer that has one token at most beside it."""
    tokens: Counter[int] = Counter()
    for piece in pieces:
        tokens[piece.index] += len(piece.token_ids)
        if piece.finish_reason == "stop" and piece.stop_reason is None and tokens[piece.index] <= 2:
            return True
    return False


def show_one(pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        print(piece.text or "", end="", flush=True)
    print()


def show_all(pieces: Iterable[Piece], prompts: Sequence[str]) -> None:
    texts = [""] * len(prompts)
    for piece in pieces:
        texts[piece.index] += piece.text or ""
        if piece.finish_reason is not None:
            print(f"--- {prompts[piece.index]}\n{texts[piece.index]}", flush=True)


def speed(pieces: Sequence[Piece]) -> str:
    """One line: how much came how fast, at the reader."""
    first, last = pieces[0].time_s, pieces[-1].time_s
    tokens = sum(len(piece.token_ids) for piece in pieces)
    rate = f", {(tokens - 1) / (last - first):.1f} tokens/s after the first" if last > first else ""
    return f"{tokens} tokens{rate}"
