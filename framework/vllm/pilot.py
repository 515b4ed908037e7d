"""Asks a policy for one step over vLLM's books, and tells it what happened. No code of vLLM is touched here."""

from __future__ import annotations

import math
from collections.abc import Callable

from schedlab.framework.errors import PolicyError, PolicyStalled, SchedlabError, policy_fault
from schedlab.framework.policy import Event, Policy
from schedlab.framework.step import Decision, Step
from schedlab.framework.vllm.books import VllmBooks


class Pilot:
    """A policy at the controls of one scheduler. `observe` is None where the policy does not listen.

    `asleep_until_ns`: the policy chose to wait until then, or until something wakes it; None while it is awake.
    """

    def __init__(self, policy: Policy, books: VllmBooks, now_ns: Callable[[], int]) -> None:
        self.policy = policy
        self.name = type(policy).__name__
        self.books = books
        self.now_ns = now_ns
        self.asleep_until_ns: float | None = None
        self.observe = self._tell if type(policy).observe is not Policy.observe else None

    def wake(self) -> None:
        """A request arrived or ended."""
        self.asleep_until_ns = None

    def decide(self, index: int, now_ns: int, token_budget: int, in_flight: bool) -> Decision:
        """What the policy wants at `now_ns`. `in_flight`: a step is being executed, and deciding nothing is no stall.

        Raises PolicyError for a broken rule, and PolicyStalled where requests wait and nothing will ever happen.
        """
        step = Step(self.books, self.name, index, now_ns, token_budget)
        try:
            self.policy.schedule(step)
        except (SchedlabError, AssertionError):
            raise
        except Exception as error:
            raise policy_fault(self.name, "schedule", error) from error
        decision = step.close()
        self._check(decision, in_flight)
        self.asleep_until_ns = decision.idle_until_ns
        if decision.decodes_all:
            decision.decodes = list(decision.decodes)  # requests leave the books' own list before the step has run
        return decision

    def _check(self, decision: Decision, in_flight: bool) -> None:
        granted = decision.prefills or decision.decodes
        decodes_all = decision.decodes_all or (in_flight and not self.books.decode_set.members)  # the last ones fly
        other = decision.prefills or decision.preempted or decision.rejected or decision.idle_until_ns is not None
        if decision.hold_until_ns is not None and (other or not decodes_all):
            raise PolicyError(self.name, "hold is legal only when a step grants one token to all of decoding, no more")
        if decision.idle_until_ns is not None:
            if granted:
                raise PolicyError(self.name, "granted tokens and called idle_until in one step")
            if decision.idle_until_ns <= decision.now_ns:
                at = f"idle_until({decision.idle_until_ns / 1e9} s) at {decision.now_ns / 1e9} s"
                raise PolicyStalled(self.name, f"{at} never wakes")
        elif not (granted or decision.rejected or in_flight):
            raise PolicyStalled(self.name, "granted nothing and did not idle: " + self._head_lacks(decision))

    def _head_lacks(self, decision: Decision) -> str:
        books = self.books
        head = next(iter(books.running), None) or (books.waiting[0] if books.waiting else decision.preempted[0][0])
        return (
            f"request {head.request_id} ({head.state}) needs {head.num_uncomputed_tokens} tokens; "
            f"{books.num_free_slots} slots and {books.num_free_blocks} blocks are free"
        )

    def sleep_s(self) -> float:
        """Seconds that are left of what the policy chose to wait; 0 if it is awake."""
        until = self.asleep_until_ns
        if until is None:
            return 0.0
        left = math.inf if math.isinf(until) else (until - self.now_ns()) / 1e9
        if left <= 0:
            self.asleep_until_ns = None
        return max(left, 0.0)

    def _tell(self, event: Event) -> None:
        try:
            self.policy.observe(event)
        except (SchedlabError, AssertionError):
            raise
        except Exception as error:
            raise policy_fault(self.name, "observe", error) from error
