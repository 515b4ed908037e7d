"""Decisions as rows, and their digest: equal decode-only steps one after the other are one row with a count."""

from __future__ import annotations

from collections.abc import Sequence

from schedlab.framework.request import NS
from schedlab.framework.results.digest import ALL_DECODES, Decodes, Digest, Grants, Pairs, batch_text, pairs_text
from schedlab.framework.results.rows import DecisionRow


class DecisionRows:
    """Collects the rows that are complete in `rows`, and the digest of all of them.

    A decode-only row stays open until a step differs from it, for it may still repeat.
    """

    __slots__ = ("_batch", "_digest", "_index", "_now_ns", "_repeat", "rows")

    def __init__(self) -> None:
        self.rows: list[DecisionRow] = []
        self._digest = Digest()
        self._batch = ""  # of the open row
        self._index = self._now_ns = self._repeat = 0

    def add(
        self,
        index: int,
        now_ns: int,
        preempted: Pairs,
        grants: Grants,
        decodes: Decodes,
        decodes_at: int,
        refusals: Pairs,
        idle_until_ns: int | None,
        starts: Sequence[int],
        rejected: Pairs,
    ) -> None:
        batch = batch_text(preempted, grants, decodes, decodes_at, rejected)
        decode_only = bool(decodes) and not grants and not preempted and not rejected
        if decode_only and not refusals and idle_until_ns is None:
            self._extend(batch, index, now_ns, 1)
            return
        self.complete()
        if decodes or grants or preempted or rejected:
            self._digest.add(batch, 1, decode_only)
        refused = pairs_text(refusals) if refusals else ""
        idle_s = "null" if idle_until_ns is None else repr(idle_until_ns / NS)
        self.rows.append(DecisionRow(index, 1, now_ns, batch, refused, idle_s, starts))

    def add_decodes(self, index: int, now_ns: int, repeat: int) -> None:
        """`repeat` steps that granted one token to each of `decoding` and did nothing else."""
        if self._batch is ALL_DECODES:
            self._repeat += repeat
        else:
            self._extend(ALL_DECODES, index, now_ns, repeat)

    def complete(self) -> None:
        """Close the open row."""
        if self._repeat:
            self._digest.add(self._batch, self._repeat, True)
            self.rows.append(DecisionRow(self._index, self._repeat, self._now_ns, self._batch, "", "null", ()))
            self._batch, self._repeat = "", 0

    def take(self) -> list[DecisionRow]:
        """The complete rows, once."""
        rows, self.rows = self.rows, []
        return rows

    def hexdigest(self) -> str:
        """Of all complete rows so far."""
        return self._digest.hexdigest()

    def _extend(self, batch: str, index: int, now_ns: int, repeat: int) -> None:
        if batch == self._batch:
            self._repeat += repeat
            return
        self.complete()
        self._batch, self._index, self._now_ns, self._repeat = batch, index, now_ns, repeat
