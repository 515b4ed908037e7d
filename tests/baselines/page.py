"""docs/baselines.md: how many runs each policy decides as the scheduler that it is named after did, and what differs.

`python tests/baselines/page.py` counts again and writes it.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import golden
import works

from schedlab.framework.policy import Policy
from schedlab.policies.fcfs import FCFS
from schedlab.policies.sarathi import Sarathi
from schedlab.policies.vllm_v1 import VLLMV1

PAGE = Path(__file__).parents[2] / "docs" / "baselines.md"
WATERMARK = {works.ROOMY: 0.01, works.TIGHT: 0.025}
"""Of Vidur's schedulers: two blocks and one, however a share is rounded."""
POOLS = {works.ROOMY: "roomy", works.TIGHT: "tight"}
HEAD = f"""# Baselines

Which policy decides as the scheduler that it is named after, step by step: the same requests in a step, from the same
position, the same number of tokens, and the same victims. The referees ran without a model, on fake outputs; their
decisions are kept in `tests/baselines/decisions/`, and `make test` compares a part of them, `make test-full` all. A run
counts as equal if every step is. Each has 48 requests in blocks of {works.BLOCK} tokens, {works.SEQS} sequences and
{works.BUDGET} tokens a step; a roomy pool has {works.ROOMY} blocks, a tight one {works.TIGHT}. `burst`: all at once;
`open`: they arrive one by one; `long`: three of ten prompts have 200 to 700 tokens; `prefix`: four of five begin with
one of four heads. `python tests/baselines/page.py` writes this page.

"""


@dataclass(frozen=True)
class Compared:
    """A policy beside a referee's runs: those of `order` and `caching`, on an engine with `limits`."""

    name: str
    referee: str
    policy: Callable[[], Policy]
    order: str = "fcfs"
    caching: bool = False
    watermark: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def runs(self) -> tuple[str, dict[golden.Setting, str]]:
        """The referee's version, and what it decided."""
        version, runs = golden.load(self.referee)
        return version, {s: t for s, t in runs.items() if (s.order, s.caching) == (self.order, self.caching)}

    def is_equal(self, setting: golden.Setting, text: str) -> bool:
        limits = {**self.limits, **({"watermark": WATERMARK[setting.blocks]} if self.watermark else {})}
        asked = works.work(setting.kind, setting.seed)
        ours = works.on_ours(self.policy(), asked, blocks=setting.blocks, caching=setting.caching, **limits)
        return works.first_difference(ours, works.read(text)) is None


COMPARED = (
    Compared("vllm_v1", "vllm", VLLMV1),
    Compared(
        "vllm_v1, order=priority", "vllm", lambda: VLLMV1(order="priority"), order="priority",
        note="where vLLM's first in line preempts itself it runs an empty step, and ours serves the next",
    ),
    Compared(
        "vllm_v1, prefix caching", "vllm", VLLMV1, caching=True,
        note="vLLM lets a prompt reuse blocks that were granted earlier in the same step, ours those of earlier steps",
    ),
    Compared("sarathi", "vidur_sarathi", lambda: Sarathi(chunk_size=works.BUDGET), watermark=True),
    Compared(
        "fcfs, reserve_decode_block, engine.watermark=0.01", "vidur_vllm", lambda: FCFS(reserve_decode_block=True),
        watermark=True, limits={"max_num_batched_tokens": 1 << 14},
        note="where nobody ran when a step began, ours waives the watermark",
    ),
)  # fmt: skip


def rows_of(one: Compared) -> list[list[str]]:
    """Cells but for the counts: policy, referee, pool, and how many runs there are of each kind."""
    version, runs = one.runs()
    total = Counter((s.blocks, s.kind) for s in runs)
    kinds = [kind for kind in works.KINDS if any(of == kind for _, of in total)]
    return [[one.name, version, POOLS[blocks], kind, str(total[blocks, kind])]
            for blocks in POOLS for kind in kinds if total[blocks, kind]]  # fmt: skip


def counted(one: Compared) -> list[int]:
    """Equal runs, in the order of `rows_of`."""
    _, runs = one.runs()
    equal = Counter((POOLS[s.blocks], s.kind) for s, text in runs.items() if one.is_equal(s, text))
    return [equal[pool, kind] for _, _, pool, kind, _ in rows_of(one)]


def written(counts: list[list[int]]) -> str:
    """The page with these counts for COMPARED."""
    lines = ["| policy | referee | pool | work | equal |", "|---|---|---|---|---|"]
    for one, equal in zip(COMPARED, counts, strict=True):
        for cells, count in zip(rows_of(one), equal, strict=True):
            *told, total = cells
            lines.append(f"| {' | '.join(told)} | {count} / {total} |")
    notes = [f"- `{one.name}`: {one.note}." for one in COMPARED if one.note]
    known = [f"- `{name}`: {differs}" for name, differs in differences().items()]
    parts = [*lines, "", "Where runs of these part:", "", *notes, "", "## Known differences from the sources", ""]
    return HEAD + "\n".join([*parts, *known, ""])


def differences() -> dict[str, str]:
    """What each policy's docstring says of its source, by the policy's module."""
    folder = Path(inspect.getfile(import_module("schedlab.policies"))).parent
    found = {}
    for path in sorted(folder.glob("*.py")):
        text = inspect.getdoc(import_module(f"schedlab.policies.{path.stem}")) or ""
        if match := re.search(r"^Differs from the source: (.*?)(\n\n|\Z)", text, re.DOTALL | re.MULTILINE):
            found[path.stem] = " ".join(match.group(1).split())
    return found


def counts_on(page: str) -> list[list[int]]:
    """What a page says, in the order of COMPARED."""
    cells = iter(re.findall(r"\| (\d+) / \d+ \|$", page, re.MULTILINE))
    return [[int(next(cells)) for _ in rows_of(one)] for one in COMPARED]


if __name__ == "__main__":
    PAGE.write_text(written([counted(one) for one in COMPARED]), encoding="utf-8")
