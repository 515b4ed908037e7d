"""Draws the requests of the embedded sample; `sample.jsonl.gz` is the recording of a run of them.

    python -m schedlab.workloads.data.make_sample drawn.jsonl.gz
    schedlab run workload=trace workload.path=drawn.jsonl.gz workload.format=mooncake workload.block_size=16 \\
        policy=chunked_prefill engine=virtual hardware=h100 model=llama3.1-8b hydra.run.dir=recorded
    schedlab trace convert recorded sample.jsonl.gz

Three kinds of traffic share 25 seconds: chat sessions of several turns under two system prompts, short calls without
any shared prefix, and long documents of which some are asked about twice; a burst arrives at second 12. Ids stand for
16 tokens each. A later turn's prompt is the turn before, its output, and the user's next words; it has a delay and no
stamp, which only a run can give it.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from schedlab.workloads.writers import encode_json, open_out

WIDTH = 16
SPAN_S = 24.0
BURST_S = 12.0


@dataclass
class Prompts:
    """Block ids by prefix: a new id for every block that is not the continuation of an equal one."""

    fresh: count[int] = field(default_factory=count)

    def extend(self, ids: list[int], known_tokens: int, length: int) -> list[int]:
        """Ids of a prompt of `length` tokens whose first `known_tokens` are those that `ids` begin with."""
        shared = min(known_tokens, length) // WIDTH
        return ids[:shared] + [next(self.fresh) for _ in range(shared, -(-length // WIDTH))]


def row(prompt: int, output: int, ids: list[int], **when: Any) -> dict[str, Any]:
    return {**when, "input_length": prompt, "output_length": output, "hash_ids": ids}


def stamp(at_s: float) -> dict[str, Any]:
    return {"timestamp": round(at_s * 1000)}


def chat(
    draw: random.Random, prompts: Prompts, name: str, at_s: float, system: list[int], system_tokens: int
) -> list[dict[str, Any]]:
    """A session of 1 to 6 turns under a system prompt."""
    rows: list[dict[str, Any]] = []
    ids, known, context, delay = system, system_tokens, system_tokens, None
    for _ in range(draw.choices(range(1, 7), weights=[3, 4, 4, 3, 2, 1])[0]):
        prompt = context + round(draw.lognormvariate(3.5, 0.6)) + 8
        output = min(96, 4 + round(draw.lognormvariate(3.2, 0.6)))
        if prompt > 1500:
            break
        ids = prompts.extend(ids, known, prompt)
        when = stamp(at_s) if delay is None else {"delay": delay}
        rows.append(row(prompt, output, ids, session_id=name, **when))
        known, context = prompt, prompt + output
        delay = round(min(4.0, draw.expovariate(1.0) + 0.3) * 1000)
    return rows


def short_call(draw: random.Random, prompts: Prompts, at_s: float) -> dict[str, Any]:
    prompt = draw.randint(16, 120)
    return row(prompt, draw.randint(4, 24), prompts.extend([], 0, prompt), **stamp(at_s))


def document(draw: random.Random, prompts: Prompts, at_s: float) -> list[dict[str, Any]]:
    """A long document and a question; one in two is followed by a second question on the same document."""
    length = draw.randint(700, 1400)
    body = prompts.extend([], 0, length)
    rows: list[dict[str, Any]] = []
    for _ in range(draw.randint(1, 2)):
        prompt = length + draw.randint(12, 60)
        rows.append(row(prompt, draw.randint(8, 48), prompts.extend(body, length, prompt), **stamp(at_s)))
        at_s += draw.uniform(0.5, 3.0)
    return rows


def sample(seed: int = 0) -> list[dict[str, Any]]:
    """All rows: those with a stamp in order of arrival, each session's later turns after its first."""
    draw, prompts = random.Random(seed), Prompts()
    systems = [(prompts.extend([], 0, n), n) for n in (144, 416)]
    groups: list[list[dict[str, Any]]] = []
    for number in range(48):
        at_s = draw.uniform(0, SPAN_S - 8) if number < 40 else draw.uniform(BURST_S, BURST_S + 1)
        groups.append(chat(draw, prompts, f"chat-{number:02d}", at_s, *systems[draw.random() < 0.4]))
    for number in range(80):
        at_s = draw.uniform(0, SPAN_S) if number < 50 else draw.uniform(BURST_S, BURST_S + 1)
        groups.append([short_call(draw, prompts, at_s)])
    for number in range(20):
        at_s = draw.uniform(0, SPAN_S - 3) if number < 14 else BURST_S + draw.random()
        groups += [[one] for one in document(draw, prompts, at_s)]
    return [one for group in sorted(groups, key=lambda g: g[0]["timestamp"]) for one in group]


def main(path: str) -> None:
    with open_out(path) as file:
        for line in sample():
            file.write(encode_json(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
