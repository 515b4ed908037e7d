"""The rules that hold between steps: counters every step, the whole of the books on demand.

`check_step` costs O(grants) and runs always; `audit` recomputes everything from scratch. A failure here is a fault of
the framework, so both assert. Knows the ledger's parts; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from schedlab.framework.ledger import Ledger
from schedlab.framework.prefix_cache import PrefixCache
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.tables import integers

if TYPE_CHECKING:
    from schedlab.framework.step import Decision


_ORDER, _ADMISSION, _STATE = attrgetter("order"), attrgetter("admission"), attrgetter("_state")
_OWNED, _TABLE = attrgetter("slot", "num_published"), attrgetter("block_table")


def check_step(decision: Decision, budget: int, ledger: Ledger) -> None:
    """Budget, slots and lengths of one decided step."""
    granted = len(decision.decodes)
    for request, start, count in decision.prefills:
        assert count >= 1, f"{request}: empty grant"
        assert start + count <= request.num_tokens, f"{request}: granted beyond its last token"
        assert len(request.block_table) == ledger.blocks_for(start + count), f"{request}: table of the wrong length"
        granted += count
    assert granted <= budget, f"granted {granted} tokens with a budget of {budget}"
    assert ledger.cache.num_unowned >= 0, "more blocks were evicted than nobody owned"


def audit(ledger: Ledger) -> None:
    """Recompute who owns what and compare it with the books. Callable between steps."""
    present = {request: _num_present(ledger.cache, request) for request in [*ledger.running, *ledger.waiting]}
    _audit_places(ledger)
    _audit_blocks(ledger)
    _audit_spans(ledger, present)
    _audit_decode_set(ledger)
    _audit_host(ledger)
    _audit_hits(ledger, present)


def num_entries(ledger: Ledger) -> int:
    """How much `audit` has to look at, in units of about a microsecond; whole arrays go faster by far."""
    cache, requests = ledger.cache, [*ledger.running, *ledger.waiting]
    blocks = cache.pool.num_blocks + sum([len(request.block_table) for request in ledger.running])
    return len(cache.index) + sum([len(request.chain.keys) + 4 for request in requests]) + blocks // 8


def _audit_places(ledger: Ledger) -> None:
    waiting, running = ledger.waiting, list(ledger.running)
    assert _ascending(map(_ORDER, waiting)), "waiting is not in arrival order"
    assert _ascending(map(_ADMISSION, running)), "running is not in admission order"
    assert ledger.running.keys().isdisjoint(waiting), "a request waits and runs"
    assert {*map(_STATE, waiting)} <= {"waiting", "preempted", "swapped"}, "a waiting request in a wrong state"
    assert {*map(_STATE, running)} <= {"running"}, "a running request in a wrong state"
    assert sorted(map(_ADMISSION, ledger.prefilling + ledger.decode_set.members)) == [*map(_ADMISSION, running)]
    slots = [r.slot for r in running] + ledger.free_slots
    assert len(slots) == len(set(slots)), "a slot is in two places"
    assert {*map(_OWNED, waiting)} <= {(-1, 0)}, "a waiting request owns something"
    received = [request for request in waiting if request.block_table]
    assert {*map(_STATE, received)} <= {"waiting"}, "a waiting request owns blocks that it did not receive"
    assert {*map(_STATE, ledger.held)} <= {"loading", "finished"}, "a request in a wrong state holds blocks"


def _ascending(numbers: Iterable[int]) -> bool:
    found = list(numbers)
    return found == sorted(found)


def _audit_blocks(ledger: Ledger) -> None:
    cache, pool = ledger.cache, ledger.pool
    indexed = [*chain.from_iterable(span.blocks for span in cache.index.values())]
    cached = np.bincount(integers(indexed), minlength=pool.num_blocks)
    owners = np.zeros(pool.num_blocks, dtype=np.int64)
    for request in [*ledger.running, *ledger.held, *filter(_TABLE, ledger.waiting)]:
        table = integers(request.block_table)
        comes = request._state in ("loading", "waiting")
        tokens = request.num_tokens if comes else request.num_computed_tokens
        assert len(set(request.block_table)) == len(table), f"{request}: a block is twice in its table"
        assert len(table) == ledger.blocks_for(tokens), f"{request}: table of the wrong length"
        owners[table] += 1
    unowned = sum(span.num_unowned for span in cache.index.values())
    assert unowned == cache.num_unowned, f"{cache.num_unowned} unowned blocks counted, {unowned} found"
    assert cached.max(initial=0) <= 1, "a block is cached twice"
    assert not ((owners > 1) & (cached == 0)).any(), "an unpublished block has two owners"
    free = np.bincount(integers(pool.free), minlength=pool.num_blocks)
    assert (free + ((owners > 0) | (cached > 0)) == 1).all(), "a block was lost, or is free and in use"
    assert not cache.remains, "remains outlived their step"


def _audit_spans(ledger: Ledger, present: dict[EngineRequest, int]) -> None:
    """`present` is how many groups of each request's chain are cached."""
    cache = ledger.cache
    held: dict[bytes, list[int]] = {}
    for request in [*ledger.running, *ledger.held]:
        left = request.num_published
        published = chain.from_iterable(span.blocks[:n] for span, n in cache._spans(request.chain, 0, left))
        assert request.block_table[:left] == [*published], f"{request}: not the blocks that it published"
        for key, start, stop in _groups(request):
            if start < left:
                held.setdefault(key, []).append(min(stop, left) - start)
    for key, span in cache.index.items():
        assert span.blocks, "an empty span is indexed"
        unowned = len(span.blocks) - (span.owner_lengths[-1] if span.owner_lengths else 0)
        assert span.num_unowned == unowned, f"a span counts {span.num_unowned} unowned blocks and has {unowned}"
        assert span.owner_lengths == sorted(held.get(key, [])), "a span's owners are not those that hold it"
        assert (span in cache.lru) == (span.num_unowned > 0), "a span is evictable without unowned blocks, or not with"
    for request, groups in present.items():
        leading = request.chain.keys[:groups]
        assert all(map(cache.index.__contains__, leading)), f"{request}: a cached span lacks its prefix"


def _num_present(cache: PrefixCache, request: EngineRequest) -> int:
    return sum(map(cache.index.__contains__, request.chain.keys))


def _groups(request: EngineRequest) -> list[tuple[bytes, int, int]]:
    ends = request.chain.ends
    return list(zip(request.chain.keys, [0, *ends][:-1], ends, strict=True))


def _audit_decode_set(ledger: Ledger) -> None:
    decode_set = ledger.decode_set
    assert decode_set.context == sum(r.num_computed_tokens for r in decode_set.members), "the sum of contexts is wrong"
    assert sorted(map(id, decode_set.members)) == sorted(id(r) for bucket in decode_set.buckets for r in bucket)
    for request in decode_set.members:
        assert request.num_uncomputed_tokens == 1 and request.num_output_tokens >= 1, f"{request} does not decode"
        assert request in decode_set.buckets[-request._base_computed % decode_set.block_size], (
            f"{request} is in a wrong bucket"
        )
        assert request.num_tokens < request.final_tokens, f"{request} should have finished"
    for request in ledger.prefilling:
        assert request.num_uncomputed_tokens > 0, f"{request} has nothing to compute"


def _audit_host(ledger: Ledger) -> None:
    used = [*chain.from_iterable(r.host_blocks for r in ledger.waiting)]
    assert sorted(used + ledger.host.free) == list(range(ledger.host.num_blocks)), "host blocks were lost or shared"
    for request in ledger.waiting:
        if used or request._state == "swapped":
            expected = ledger.blocks_for(request._base_computed) if request._state == "swapped" else 0
            assert len(request.host_blocks) == expected, f"{request}: {len(request.host_blocks)} host blocks"


def _audit_hits(ledger: Ledger, present: dict[EngineRequest, int]) -> None:
    cache = ledger.cache
    for request in ledger.waiting:
        groups, cached = present[request], 0
        if groups:
            keys, ends = request.chain.keys, request.chain.ends
            before = ends[groups - 2] if groups > 1 else 0
            limit = min((request._base_tokens - 1) // cache.block_size, ends[-1])  # whoever waits does not tick
            cached = min(before + len(cache.index[keys[groups - 1]].blocks), limit)
        assert cache.hit_blocks(request) == cached, f"{request}: its hit is out of date"
    promised: Counter[bytes] = Counter()
    for request in ledger.running:
        promised.update(
            key for key, _, stop in _groups(request)[: request.promised_groups] if stop > request.num_published
        )
    assert dict(promised) == cache.computing, "what running requests will publish is out of date"
