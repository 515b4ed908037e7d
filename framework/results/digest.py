"""The digest of a run's decisions: equal digests mean equal batches in equal order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any

Pairs = Sequence[tuple[str, str]]
"""Request ids with a mode or a reason."""
Grants = Sequence[tuple[str, int]]
"""Request ids with tokens, in the order granted."""
Decodes = Sequence[str] | str
"""`"all"`, or the ids of the requests that decode."""

ALL_DECODES = '"preempted":[],"grants":[],"decodes":"all","decodes_at":0'
"""The batch that gives one token to each decoding request and does nothing else."""


def batch_text(
    preempted: Pairs, grants: Grants, decodes: Decodes, decodes_at: int, rejected: Pairs = ()
) -> str:  # fmt: skip
    """Canonical JSON of a step's batch: what the digest covers, and the middle of a decision row.

    `decodes` is `"all"` or request ids; the batch is `grants[:decodes_at]`, the decodes, `grants[decodes_at:]`. Who was
    rejected is a member only where there is anybody.
    """
    if not grants and not preempted and not rejected and decodes == "all":
        return ALL_DECODES
    victims = pairs_text(preempted) if preempted else ""
    granted = ",".join([f"[{quote(request_id)},{tokens}]" for request_id, tokens in grants]) if grants else ""
    decoded = '"all"' if decodes == "all" else f"[{','.join(map(quote, decodes))}]"
    place = decodes_at if decodes else 0
    turned_away = f',"rejected":[{pairs_text(rejected)}]' if rejected else ""
    return f'"preempted":[{victims}],"grants":[{granted}],"decodes":{decoded},"decodes_at":{place}{turned_away}'


def pairs_text(pairs: Pairs) -> str:
    return ",".join([f"[{quote(request_id)},{quote(text)}]" for request_id, text in pairs])


class Digest:
    """128-bit blake2b of a run's batches in order: preemptions, grants, decodes and rejections, never times, verbs or
    refusals.

    Consecutive equal decode-only batches are one row with a count, however they were reported. Empty batches leave no
    trace, since idling is not part of the batch.
    """

    __slots__ = ("_batch", "_hash", "_repeat")

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._batch = ""
        self._repeat = 0

    def add(self, batch: str, repeat: int, decode_only: bool) -> None:
        if decode_only and batch == self._batch:
            self._repeat += repeat
            return
        self._hash.update(self._row())
        self._batch, self._repeat = batch, repeat

    def _row(self) -> bytes:
        return f"{self._repeat} {self._batch}\n".encode() if self._repeat else b""

    def hexdigest(self) -> str:
        """Of all batches so far."""
        total = self._hash.copy()
        total.update(self._row())
        return total.hexdigest()


def digest_of(decisions: dict[str, Any]) -> str:
    """The digest of a decisions table, equal to that of the run that wrote it."""
    digest = Digest()
    columns = [decisions[name] for name in ("preempted", "grants", "decodes", "decodes_at", "repeat", "rejected")]
    for preempted, grants, decodes, decodes_at, repeat, rejected in zip(*columns, strict=True):
        if preempted or grants or decodes or rejected:
            batch = batch_text(preempted, grants, decodes, decodes_at, rejected)
            digest.add(batch, int(repeat), not preempted and not grants and not rejected)
    return digest.hexdigest()
