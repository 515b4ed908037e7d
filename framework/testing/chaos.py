"""A policy that decides at random, so that the engine meets every order of verbs that the contract allows."""

from __future__ import annotations

import random

from schedlab.framework.policy import Policy
from schedlab.framework.request import Request
from schedlab.framework.step import Step


class Chaos(Policy):
    """Random partial decodes, chunks, admissions out of order, preemptions of both modes, refunds; never stalls.

    Every step ends with at least one grant: if luck gave none, the oldest request gets what fits once the others are
    preempted.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schedule(self, step: Step) -> None:
        self._waiting = list(step.waiting)
        self._running = list(step.running)
        before = step.token_budget
        self._untouched = {request.request_id for request in self._waiting + self._running}
        for _ in range(self._random.randint(1, 4)):
            self._random.choice((self._decode, self._decode, self._prefill, self._admit, self._admit, self._preempt))(
                step
            )
        if step.token_budget == before:
            self._insist(step)

    def _mine(self, requests: list[Request]) -> list[Request]:
        return [request for request in requests if request.request_id in self._untouched]

    def _try(self, step: Step, request: Request, tokens: int | None = None) -> bool:
        if grant := step.grant(request, tokens):
            self._untouched.discard(request.request_id)
        return bool(grant)

    def _decode(self, step: Step) -> None:
        decoding = self._mine(list(step.decoding))
        if len(decoding) == len(step.decoding) and self._random.random() < 0.6:
            refused = {request.request_id for request in step.grant_decodes()}
            self._untouched -= {request.request_id for request in decoding} - refused
            return
        for request in decoding:
            if self._random.random() < 0.7:
                self._try(step, request)

    def _prefill(self, step: Step) -> None:
        for request in self._mine(list(step.prefilling)):
            if self._random.random() < 0.8:
                self._try(step, request, self._random.choice([None, 1, 2, 5]))

    def _admit(self, step: Step) -> None:
        waiting = self._mine(self._waiting)
        for request in self._random.sample(waiting, min(len(waiting), 2)):
            step.cached_tokens(request)
            step.pending_tokens(request)
            self._try(step, request, self._random.choice([None, 1, 3, step.fits(request) or None]))

    def _preempt(self, step: Step) -> None:
        victims = [request for request in self._running if request.state == "running"]
        if victims and self._random.random() < 0.4:
            victim = self._random.choice(victims)
            step.preempt(victim, self._random.choice(("recompute", "swap")))
            self._untouched.discard(victim.request_id)

    def _insist(self, step: Step) -> None:
        for request in self._mine(self._running) + self._mine(self._waiting):
            if step.fits(request) and self._try(step, request, step.fits(request)):
                return
        survivors = self._mine(self._running)
        for victim in reversed(survivors[1:]):
            step.preempt(victim, "recompute")
            self._untouched.discard(victim.request_id)
            if step.fits(survivors[0]) and self._try(step, survivors[0], step.fits(survivors[0])):
                return
        step.idle_until(step.now + 0.001)
