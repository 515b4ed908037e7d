"""What a policy still holds of requests that have ended: a run of days must not fill the memory."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType

from schedlab.framework.request import EngineRequest
from schedlab.framework.step import Step
from schedlab.framework.testing.case import Case, Subject, Violation
from schedlab.framework.testing.harness import Spec

COUNT, ALLOWED = 4000, 1500
"""Requests of the run, and how many a policy may not have forgotten yet at its end."""
NOT_ITS_OWN = (type, ModuleType, FunctionType, Step)
LOAD = Case(
    tuple(Spec(f"request {i}", i // 8 * 16_000_000, 4, 1, client=f"c{i % 5}") for i in range(COUNT)),
    {"num_blocks": 400, "max_num_seqs": 64, "max_num_batched_tokens": 512, "audit_every": 1 << 60},
)


def forgets(subject: Subject) -> int:
    """How many of COUNT ended requests the policy still holds, by object or by name. Violation of `memory`."""
    policy = subject.make()
    outcome = subject.run(LOAD, policy=policy)
    held = _held(policy, {request.request_id for request in outcome.requests})
    if held > ALLOWED:
        raise Violation(
            "memory", f"holds {held} of {COUNT} requests that have ended: forget them when `observe` says so"
        )
    return held


def _held(policy: object, names: set[str]) -> int:
    """Requests that can be reached from the policy."""
    seen, found, todo = {id(policy)}, set[str](), [policy]
    while todo:
        for item in gc.get_referents(todo.pop()):
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, EngineRequest):
                found.add(item.request_id)
            elif isinstance(item, str):
                found |= {item} & names
            elif not isinstance(item, NOT_ITS_OWN):
                todo.append(item)
    return len(found)
