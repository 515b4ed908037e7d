"""Works on which decisions are compared step by step, what our engine decides on them, and decisions as text.

A step is `(grants, victims)`: `{request: (start, tokens)}` and the names of whom it preempted, sorted. Requests are
numbered in the order of their arrival. A millisecond is a step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from schedlab.framework.clock import VirtualClock
from schedlab.framework.content import TokenContent
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.request import EngineRequest, SamplingParams
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.framework.stub import StubExecutor

BLOCK, SEQS, BUDGET, MODEL_LEN = 32, 16, 256, 2048
MS = 1_000_000
ROOMY, TIGHT = 200, 40
PLAIN = ("burst", "open", "open long")
SHARED = ("burst prefix", "open prefix long")
KINDS = (*PLAIN, *SHARED)
SEEDS = 20


@dataclass(frozen=True)
class Asked:
    """A request: `tokens` to generate, visible from step `at` on; the smaller `urgency` goes first, as in vLLM."""

    number: int
    prompt: list[int]
    tokens: int
    at: int
    urgency: int


def work(kind: str, seed: int) -> list[Asked]:
    """48 requests: at once or `open`, some with `long` prompts, four of five behind one of four heads (`prefix`)."""
    dice = random.Random(f"{kind} {seed}")
    heads = [[dice.randrange(2, 512) for _ in range(length)] for length in (96, 128, 163, 64)]
    asked, at = [], 1.0
    for number in range(48):
        head = dice.choice(heads) if "prefix" in kind and dice.random() < 0.8 else []
        length = dice.randint(200, 700) if "long" in kind and dice.random() < 0.3 else dice.randint(5, 120)
        at += dice.expovariate(0.4) if "open" in kind else 0.0
        prompt = head + [dice.randrange(2, 512) for _ in range(length)]
        asked.append(Asked(number, prompt, dice.randint(4, 60), int(at), dice.randrange(3)))
    return asked


class Noting(Engine):
    """An engine that notes what each of its steps decides."""

    def __init__(self, *parts) -> None:
        super().__init__(*parts)
        self.noted = []

    def _execute(self, decision, scheduler_us, steps):
        grants = {int(p.request.request_id): (p.start, p.tokens) for p in decision.prefills}
        grants |= {int(r.request_id): (r.num_computed_tokens, 1) for r in decision.decodes}
        self.noted.append((grants, sorted(int(victim.request_id) for victim, _, _ in decision.preempted)))
        return super()._execute(decision, scheduler_us, steps)


def on_ours(policy, asked, *, blocks, caching=False, predictor=None, **keys):
    """What `policy` decides on our engine, a step a millisecond."""
    limits = {"max_num_seqs": SEQS, "max_num_batched_tokens": BUDGET, "block_size": BLOCK, **keys}
    config = EngineConfig(
        num_blocks=blocks, max_model_len=MODEL_LEN, enable_prefix_caching=caching, fast_forward=False,
        honour_holds=False, **limits,
    )  # fmt: skip
    requests = [
        EngineRequest(
            str(one.number), (one.at - 1) * MS + one.number, len(one.prompt), TokenContent(one.prompt),
            recorded_output_tokens=one.tokens, max_tokens=one.tokens, priority=-one.urgency, visible_ns=one.at * MS,
            sampling=SamplingParams(ignore_eos=True),
        )
        for one in asked
    ]  # fmt: skip
    recorder = Recorder(Measurement(limits["max_num_seqs"], blocks))
    executor = StubExecutor(512, step_ns=MS, token_ns=0)
    engine = Noting(policy, executor, ListSource(requests), config, VirtualClock(), recorder, predictor)
    engine.run()
    return engine.noted


def first_difference(ours, theirs) -> int | None:
    """The first step at which two runs decide differently."""
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


# -- as text: `7.64+192` is 192 tokens of request 7 from its 65th on, `7` one token from where it is, `!3` a victim --


def written(steps) -> str:
    """`steps`, one in a line; equal lines in a row are counted."""
    lines, ends = [], {}
    for grants, victims in steps:
        words = [
            f"{who}" if (ends.get(who), 1) == (start, tokens) else f"{who}.{start}+{tokens}"
            for who, (start, tokens) in sorted(grants.items())
        ]
        ends |= {who: start + tokens for who, (start, tokens) in grants.items()}
        lines.append(" ".join([*words, *[f"!{who}" for who in victims]]))
    return "\n".join(_counted(lines))


def _counted(lines: list[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        stop = at
        while stop < len(lines) and lines[stop] == lines[at]:
            stop += 1
        yield f"{stop - at}x {lines[at]}"
        at = stop


def read(text: str):
    """What `written` wrote."""
    steps, ends = [], {}
    for line in text.splitlines():
        times, _, rest = line.partition("x ")
        for _ in range(int(times)):
            steps.append(_step_of(rest.split(), ends))
    return steps


def _step_of(words: list[str], ends: dict[int, int]):
    grants = {}
    for word in words:
        if not word.startswith("!"):
            who, _, where = word.partition(".")
            start, _, tokens = where.partition("+")
            grants[int(who)] = (int(start), int(tokens)) if where else (ends[int(who)], 1)
    ends |= {who: start + tokens for who, (start, tokens) in grants.items()}
    return grants, [int(word[1:]) for word in words if word.startswith("!")]
