"""What a prompt consists of: its identity (which blocks are equal to whose) and the tokens that stand for it.

Identity is a chain of 128-bit digests, each covering everything before it, so equal keys mean equal prefixes. Knows
nothing of pools, of who holds which block, or of models beyond the size of their vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from operator import gt
from typing import Protocol

import numpy as np

_U64 = np.uint64


@dataclass(slots=True)
class Chain:
    """Identity of a request's leading whole blocks, in groups that are known by one key each.

    Group i covers the blocks `ends[i-1] .. ends[i]` (`ends[-1]` stands for 0 when i = 0). Tokens give one block a
    group, a trace id of 512 tokens gives 32 blocks of 16 a group. An empty chain has no identity: nothing is ever
    shared.
    """

    keys: list[bytes]
    ends: list[int]

    @property
    def num_blocks(self) -> int:
        return self.ends[-1] if self.ends else 0


NO_IDENTITY = Chain([], [])


class Content(Protocol):
    """The content of one prompt.

    `has_identity`: equal content can be recognised. `shares_output`: generated tokens are content of the next prompt.
    """

    has_identity: bool
    shares_output: bool

    def chain(self, num_tokens: int, block_size: int) -> Chain:
        """Identity of the whole blocks within the first `num_tokens` tokens (all of them, if `shares_output`)."""

    def tokens(self, num_tokens: int, vocab_size: int) -> np.ndarray:
        """int64 [num_tokens]; equal identity means equal tokens."""


def digest(*parts: bytes) -> bytes:
    """128-bit digest of length-prefixed parts, the same in every process."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        h.update(struct.pack("<q", len(part)))
        h.update(part)
    return h.digest()


def extend_key(parent: bytes, value: bytes) -> bytes:
    """Key of the content `value` after everything that `parent` stands for."""
    return hashlib.blake2b(value, digest_size=16, key=parent).digest()


def _extended(parent: bytes, values: Sequence[bytes]) -> bytes:
    """`extend_key` of each value, joined; a keyed hash is cheaper to copy than to begin."""
    begun, keys = hashlib.blake2b(digest_size=16, key=parent), []
    for value in values:
        h = begun.copy()
        h.update(value)
        keys.append(h.digest())
    return b"".join(keys)


def stream_tokens(key: bytes, start: int, stop: int, vocab_size: int) -> np.ndarray:
    """Tokens `start..stop` of the endless stream named by `key` (splitmix64 over key + position), int64."""
    return _scrambled(np.arange(start, stop, dtype=_U64) + _first_word(key), vocab_size)


def _first_word(key: bytes) -> np.uint64:
    return _U64(int.from_bytes(key[:8], "little"))


def _scrambled(x: np.ndarray, vocab_size: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        x *= _U64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
        x ^= x >> _U64(31)
    return (x % _U64(vocab_size)).astype(np.int64)


class TokenContent:
    """A prompt of real tokens: identity is the tokens themselves, block by block."""

    __slots__ = ("token_ids",)
    has_identity = True
    shares_output = False

    def __init__(self, token_ids: Sequence[int] | np.ndarray) -> None:
        self.token_ids = np.asarray(token_ids, dtype=np.int64)

    def chain(self, num_tokens: int, block_size: int) -> Chain:
        whole = min(num_tokens, len(self.token_ids)) // block_size
        data = self.token_ids[: whole * block_size].tobytes()
        width = 8 * block_size
        key = digest(b"tokens")
        keys = [key := extend_key(key, data[i : i + width]) for i in range(0, whole * width, width)]
        return Chain(keys, list(range(1, whole + 1)))

    def tokens(self, num_tokens: int, vocab_size: int) -> np.ndarray:
        return self.token_ids[:num_tokens]


class IdContent:
    """A prompt known by the trace's block ids, each standing for `width` tokens (the last for what is left).

    An id is equal to an equal id of equal width after equal ids; `namespace` keeps ids of other scopes apart. The
    tokens are generated from (seed, namespace, id), so equal ids are equal tokens.
    """

    __slots__ = ("ids", "namespace", "seed", "width")
    has_identity = True
    shares_output = False

    def __init__(self, ids: Sequence[int], width: int, namespace: str = "", seed: int = 0) -> None:
        self.ids = ids
        self.width = width
        self.namespace = namespace
        self.seed = seed

    def chain(self, num_tokens: int, block_size: int) -> Chain:
        ids = self.ids[: -(-num_tokens // self.width)]
        widths = [self.width] * len(ids)
        if ids:
            widths[-1] = min(self.width, num_tokens - self.width * (len(ids) - 1))
        key = digest(b"ids", self.namespace.encode())
        keys = [key := extend_key(key, b"%d:%d" % named) for named in zip(ids, widths, strict=True)]
        ends = [covered // block_size for covered in accumulate(widths)]
        whole = list(map(gt, ends, [0, *ends]))  # a block belongs to the id that holds its last token
        return Chain(list(compress(keys, whole)), list(compress(ends, whole)))

    def tokens(self, num_tokens: int, vocab_size: int) -> np.ndarray:
        scope = digest(b"id-tokens", b"%d" % self.seed, self.namespace.encode())
        needed = self.ids[: -(-num_tokens // self.width)]
        keys = _extended(scope, [b"%d" % block_id for block_id in needed])
        words = np.frombuffer(keys, dtype="<u8")[::2].astype(_U64)  # the first half of each key
        places_IW = words[:, None] + np.arange(self.width, dtype=_U64)  # all streams at once: a step may wait for this
        tokens = _scrambled(places_IW.ravel()[:num_tokens], vocab_size)
        if len(tokens) == num_tokens:
            return tokens
        # floor-form traces leave a tail without an id, which is nobody else's
        tail = extend_key(scope, b"tail" + b",".join(b"%d" % i for i in self.ids))
        return np.concatenate([tokens, stream_tokens(tail, 0, num_tokens - len(tokens), vocab_size)])


class UniqueContent:
    """A prompt that nobody shares: tokens from (seed, row), no identity."""

    __slots__ = ("row", "seed")
    has_identity = False
    shares_output = False

    def __init__(self, row: int, seed: int = 0) -> None:
        self.row = row
        self.seed = seed

    def chain(self, num_tokens: int, block_size: int) -> Chain:
        return NO_IDENTITY

    def tokens(self, num_tokens: int, vocab_size: int) -> np.ndarray:
        return stream_tokens(digest(b"row", b"%d" % self.seed, b"%d" % self.row), 0, num_tokens, vocab_size)


class SessionContent:
    """A turn whose prompt is the session so far plus new tokens: identity is (session, position).

    `history` holds the tokens of the previous turn (prompt and what was actually generated), or None where the executor
    has no tokens; what follows is generated from (seed, session, position).
    """

    __slots__ = ("history", "seed", "session")
    has_identity = True
    shares_output = True

    def __init__(self, session: str, history: np.ndarray | None = None, seed: int = 0) -> None:
        self.session = session
        self.history = history
        self.seed = seed

    def chain(self, num_tokens: int, block_size: int) -> Chain:
        scope = digest(b"session", self.session.encode())
        whole = num_tokens // block_size
        return Chain([extend_key(scope, b"%d" % i) for i in range(whole)], list(range(1, whole + 1)))

    def tokens(self, num_tokens: int, vocab_size: int) -> np.ndarray:
        past = np.empty(0, dtype=np.int64) if self.history is None else self.history[:num_tokens]
        key = digest(b"session-tokens", b"%d" % self.seed, self.session.encode())
        return np.concatenate([past, stream_tokens(key, len(past), num_tokens, vocab_size)])
