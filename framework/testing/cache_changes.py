"""Whether a policy sees that the prefix cache changed: its order must not depend on when that happened.

Two runs reach a moment at which the same requests, arrived at the same times, wait for the only slot and the cache
holds the same; in one of them the cache changed before they came, in the other while they waited. A policy that ranks
by what it once read admits in another order. Knows requests and steps; knows no policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedlab.framework.engine import Engine
from schedlab.framework.policy import Policy
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.case import Case, Subject, Violation
from schedlab.framework.testing.harness import Spec

MS = 1_000_000
WIDTH = 4
"""Tokens of a block and of an id."""
CAME = 50
"""When the queue comes, in ms and steps of 1 ms each."""
QUEUE = ((0, 0), (4, 1), (2, 2), (8, 3), (0, 4), (6, 5))
"""Blocks shared with the prefix, and microseconds after CAME, of each request that waits."""
PREFIX = tuple(range(8))


def sees_changes(subject: Subject) -> int:
    """Violation of `cache`. Returns how many orders were compared."""
    compared = 0
    for what, (early, late) in PAIRS.items():
        before, after = (_order(subject, case) for case in (early, late))
        if before is None or after is None:
            continue  # it threw the blocker out, so that the two runs no longer differ in this alone
        compared += 1
        if before != after:
            raise Violation(
                "cache",
                f"where blocks are {what} while requests wait it admits {' '.join(after)}, "
                f"where they are before {' '.join(before)}",
            )
    return compared


def _queue() -> list[Spec]:
    """Requests of one length; each has blocks of its own behind those that it shares."""
    queue = []
    for i, (shared, us) in enumerate(QUEUE):
        ids = PREFIX[:shared] + tuple(100 * (i + 1) + j for j in range(10 - shared))
        queue.append(Spec(f"w{i}", CAME * MS + us * 1000, 40, 2, ids=ids, id_width=WIDTH))
    return queue


def _publishing(arrival: int, output: int) -> Case:
    """A blocker computes the prefix in chunks of 8 from `arrival` on and answers until 80 ms after CAME."""
    blocker = Spec("blocker", arrival * MS, 48, output, ids=(*PREFIX, 50, 51, 52, 53), id_width=WIDTH, priority=9)
    return _case([blocker, *_queue()], num_blocks=400)


def _evicting(arrival: int, prompt: int) -> Case:
    """The prefix is cached; then a blocker of 96 tokens takes the whole pool, most of it with a prompt of `prompt`."""
    seed = Spec("seed", 0, 33, 1, ids=(*PREFIX, 60), id_width=WIDTH, priority=9)
    blocker = Spec("blocker", arrival * MS, prompt, 97 - prompt, priority=9)
    return _case([seed, blocker, *_queue()], num_blocks=24)


def _case(trace: Sequence[Spec], num_blocks: int) -> Case:
    limits = {"num_blocks": num_blocks, "block_size": WIDTH, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    return Case(tuple(trace), limits)


PAIRS = {
    "published": (_publishing(CAME - 30, 104), _publishing(CAME - 1, 75)),
    "evicted": (_evicting(9, 60), _evicting(CAME - 7, 63)),
}


class Admissions:
    """Called after every boundary: who was admitted, in order, and whether the blocker held the slot to its end."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.disturbed = False

    def __call__(self, engine: Engine) -> None:
        for request in engine.ledger.running:
            name = request.request_id
            self.disturbed |= request.num_preemptions > 0
            if name not in self.order:
                self.order.append(name)


def _order(subject: Subject, case: Case) -> list[str] | None:
    """Names of the queue in the order of their admission; None if anybody was preempted or turned away."""
    seen = Admissions()
    policy: Policy = subject.make()
    subject.run(case, policy=policy, executor=StubExecutor(token_ns=0), on_step=seen)
    queue = [name for name in seen.order if name.startswith("w")]
    return None if seen.disturbed or len(queue) < len(QUEUE) else queue
