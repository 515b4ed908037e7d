"""What a user may say about a trace file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schedlab.framework.errors import ConfigError
from schedlab.workloads.values import UNITS


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a user may say about a file that the file does not say itself; None leaves the format's own convention.

    time_unit   : ns, us, ms or s, of numeric times
    block_size  : tokens that one block id stands for
    hash_scope  : `global` (an id means the same in all rows) or `session`
    keep_failed : keep rows without output as prompt-only requests
    keep_empty  : keep rows without a prompt too: for statistics, no engine admits them
    strict      : refuse rows out of order instead of sorting them, and turns that begin before the one before has
                  ended instead of letting them wait for it
    columns     : our column -> the file's, for plain tables
    priority_order : of a priority column: `larger_first`, as policies read it, or `smaller_first`, as vLLM does
    max_span_s  : the longest deadline or abort that counts from the arrival; beyond it the column is taken for times
                  on the file's clock, and refused
    gap         : how stamped turns without a delay follow the one before: `stamped` (as they are), or `tie` (the
                  stamps' difference after its end)
    tokenizer   : of text formats: a directory or name that `transformers` loads
    """

    time_unit: str | None = None
    block_size: int | None = None
    hash_scope: str | None = None
    keep_failed: bool = False
    keep_empty: bool = False
    strict: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    priority_order: str = "larger_first"
    max_span_s: float = 86_400.0
    gap: str = "stamped"
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.time_unit is not None and self.time_unit not in UNITS:
            raise ConfigError(f"time_unit={self.time_unit}, expected one of {', '.join(UNITS)}")
        if self.block_size is not None and self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size}, expected at least 1")
        if self.hash_scope not in (None, "global", "session"):
            raise ConfigError(f"hash_scope={self.hash_scope}, expected global or session")
        if self.priority_order not in ("larger_first", "smaller_first"):
            raise ConfigError(f"priority_order={self.priority_order}, expected larger_first or smaller_first")
        if self.gap not in ("stamped", "tie"):
            raise ConfigError(f"gap={self.gap}, expected stamped or tie")
        if not self.max_span_s > 0:
            raise ConfigError(f"max_span_s={self.max_span_s}, expected above 0")


WHOLE = ReadOptions(strict=True)
"""For files that must be whole and in order, as what a finished run was offered."""
