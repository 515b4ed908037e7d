"""How many standing decode steps are one boundary, executed back to back without the host between them."""

from __future__ import annotations

from schedlab.framework.ledger import Ledger
from schedlab.framework.request import EngineRequest


class Chains:
    """Cuts standing decisions into chains of at most `most` steps."""

    def __init__(self, ledger: Ledger, most: int) -> None:
        self._ledger = ledger
        self._most = most

    def limit(self) -> int:
        """`most`, or 1 while a request decodes that any token may end: what follows it must not be computed."""
        return self._most if self._most == 1 or all(map(ends_by_length, self._ledger.decode_set.members)) else 1

    def take(self) -> int:
        """The length of the chain that starts now; gives the blocks of all but the first step.

        Those of the first are given already. The chain ends with the step in which a member reaches its final length,
        and before one that would lack a block or evict one that a waiting request counts on.
        """
        limit = self.limit()
        if limit == 1:
            return 1
        decode_set, cache = self._ledger.decode_set, self._ledger.cache
        last = decode_set.next_finish()
        assert last is not None, "a chain of an empty decode set"
        steps = min(limit, last - decode_set.tick)
        for ahead in range(1, steps):
            needing = decode_set.buckets[(decode_set.tick + ahead) % decode_set.block_size]
            if not needing:
                continue
            if len(needing) > cache.num_free or cache.would_evict_expected_hit(len(needing)):
                return ahead
            self._ledger.grow(needing)
        return steps


def ends_by_length(request: EngineRequest) -> bool:
    """Whether nothing but its length ends `request`: it replays a recorded one, or stops at no token and no text."""
    sampling = request.sampling
    if request.recorded_output_tokens is not None:
        return True
    return sampling is not None and sampling.ignore_eos and not (sampling.stop or sampling.stop_token_ids)
