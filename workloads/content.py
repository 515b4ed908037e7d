"""Prompts made of segments of unequal length, as retrieval-augmented traces record them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedlab.framework.content import Chain, digest, extend_key, stream_tokens


class SegmentContent:
    """A prompt known by ids that each stand for their own number of tokens (`widths`), the rest being nobody else's.

    An id is equal to an equal id of equal width after equal ids; tokens are generated from (seed, namespace, id).
    """

    __slots__ = ("ids", "namespace", "seed", "widths")
    has_identity = True
    shares_output = False

    def __init__(self, ids: Sequence[int], widths: Sequence[int], namespace: str = "", seed: int = 0) -> None:
        self.ids = ids
        self.widths = widths
        self.namespace = namespace
        self.seed = seed

    def chain(self, num_tokens: int, block_size: int) -> Chain:
        """Identity of the whole blocks under the segments; a block belongs to the segment that holds its last token."""
        chain = Chain([], [])
        key = digest(b"segments", self.namespace.encode())
        covered = 0
        for segment, width in zip(self.ids, self.widths, strict=True):
            width = min(width, num_tokens - covered)
            key = extend_key(key, b"%d:%d" % (segment, width))
            covered += width
            if covered // block_size > chain.num_blocks:
                chain.keys.append(key)
                chain.ends.append(covered // block_size)
        return chain

    def tokens(self, num_tokens: int, vocab_size: int) -> np.ndarray:
        """int64 [num_tokens]."""
        scope = digest(b"segment-tokens", b"%d" % self.seed, self.namespace.encode())
        parts = [
            stream_tokens(extend_key(scope, b"%d" % segment), 0, width, vocab_size)
            for segment, width in zip(self.ids, self.widths, strict=True)
        ]
        rest = num_tokens - sum(self.widths)
        tail = extend_key(scope, b"tail" + b",".join(b"%d" % i for i in self.ids))
        parts.append(stream_tokens(tail, 0, max(rest, 0), vocab_size))
        return np.concatenate(parts)[:num_tokens]
