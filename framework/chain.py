"""How many standing decode steps are one boundary, executed back to back without the host between them.

Knows the cohort, its blocks and what may end a request; knows nothing of policies, executors or time.
"""

from __future__ import annotations

from collections.abc import Iterable

from schedlab.framework.ledger import Ledger
from schedlab.framework.request import EngineRequest


def chain_limit(members: Iterable[EngineRequest], most: int) -> int:
    """`most`, or 1 while a request decodes that any token may end: what follows it must not be computed."""
    return most if most == 1 or all(map(ends_by_length, members)) else 1


def ends_by_length(request: EngineRequest) -> bool:
    """Whether nothing but its length ends `request`: it replays a recorded one, or stops at no token and no text."""
    sampling = request.sampling
    if request.recorded_output_tokens is not None:
        return True
    return sampling is not None and sampling.ignore_eos and not (sampling.stop or sampling.stop_token_ids)


def take_chain(ledger: Ledger, limit: int) -> int:
    """The length of the chain that starts now, at most `limit` steps; gives the blocks of all but the first step.

    Those of the first are given already. The chain ends with the step in which a member reaches its final length, and
    before one that would lack a block or evict one that a waiting request counts on.
    """
    cohort, cache = ledger.cohort, ledger.cache
    last = cohort.next_finish()
    assert last is not None, "a chain of an empty cohort"
    steps = min(limit, last - cohort.tick)
    for ahead in range(1, steps):
        needing = cohort.buckets[(cohort.tick + ahead) % cohort.block_size]
        if not needing:
            continue
        if len(needing) > cache.num_free or cache.eviction_disturbs(len(needing)):
            return ahead
        ledger.grow(needing)
    return steps
