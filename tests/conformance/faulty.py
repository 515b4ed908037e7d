"""Policies that are right but for one fault each, such as authors and engines have made."""

import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from schedlab.framework.policy import Aborted, Finished, Policy, Preempted
from schedlab.framework.request import Request
from schedlab.policies.common import admit, continue_prefills, decode_all, fits_whole, remaining


@dataclass
class Sound(Policy):
    """Decodes, then prompts, then whom `order` names; what the others here are made of."""

    def order(self, step) -> Iterable[Request]:
        return step.waiting

    def schedule(self, step):
        undisturbed = decode_all(step)
        chunks = continue_prefills(step, step.token_budget)
        if undisturbed:
            chunks += admit(step, self.order(step), step.token_budget)
            if not chunks:
                step.hold()


class OverrunsTheBudget(Sound):
    def schedule(self, step):
        step._budget += 40
        super().schedule(step)


class ShortestFirst(Sound):
    """Without aging, and without saying so."""

    def order(self, step):
        return sorted(step.waiting, key=lambda request: remaining(step, request))


class AdmitsOneChunk(Sound):
    """Lets in whatever has room for its first chunk, and throws it out again when the second has none."""

    def schedule(self, step):
        decode_all(step)
        for request in step.prefilling:
            if request.state == "running" and step.token_budget and not step.grant(request, 4):
                step.preempt(request)
        for request in step.waiting:
            step.grant(request, 4)
        if step.running or step.waiting:
            self._anything(step)

    def _anything(self, step):
        for request in [*step.prefilling, *step.waiting]:
            if step.fits(request):
                step.grant(request)


class StartsOver(Policy):
    """Gives the first request a chunk, throws it out in the next step, and starts with it again."""

    def schedule(self, step):
        if step.running:
            for request in step.running:
                step.preempt(request)
            step.idle_until(step.now + 0.001)
        else:
            step.grant(step.waiting[0], 4)


class StickyFull(Sound):
    """Remembers that the pool was full, for good."""

    def __init__(self):
        self.full = False

    def order(self, step):
        for request in step.waiting:
            self.full = self.full or not fits_whole(step, request)
            if not self.full:
                yield request


class FullUntilAFinish(StickyFull):
    """Remembers it until somebody finishes; but those who are aborted make room, too."""

    def observe(self, event):
        if isinstance(event, Finished):
            self.full = False


class ForgetsRefusedDecodes(Policy):
    def schedule(self, step):
        step.grant_decodes()
        continue_prefills(step, step.token_budget)
        admit(step, step.waiting, step.token_budget)


class OrderOfASet(Sound):
    def order(self, step):
        waiting = {request.request_id: request for request in step.waiting}
        return [waiting[name] for name in set(waiting)]


class OrderOfAddresses(Sound):
    def order(self, step):
        return list(set(step.waiting))


class WallClock(Sound):
    def order(self, step):
        now = time.monotonic()
        return sorted(step.waiting, key=lambda request: request.arrival_s - now)


class GrantsThePreempted(Sound):
    """Preempts whoever lacks a block, and tries once more with what that freed."""

    def schedule(self, step):
        refused = step.grant_decodes()
        for request in refused:
            step.preempt(request)
            step.grant(request, 1)
        continue_prefills(step, step.token_budget)
        if not refused:
            admit(step, step.waiting, step.token_budget)


class WaitsWithoutIdling(Sound):
    """Collects a batch of three before it starts, and does not say that it waits."""

    def schedule(self, step):
        if step.running or len(step.waiting) >= 3:
            super().schedule(step)


class HoldsAcrossArrivals(Sound):
    """Looks at the queue in every eighth call, as if calls were steps."""

    def __init__(self):
        self.calls = 0

    def order(self, step):
        self.calls += 1
        return step.waiting if self.calls % 8 == 0 or not step.running else ()


class HoldsUntilAFinish(Sound):
    """Once it has held, holds on until somebody finishes, whoever arrives."""

    def __init__(self):
        self.standing = False

    def schedule(self, step):
        if self.standing and step.decoding and not step.prefilling and not step.grant_decodes():
            step.hold()
            return
        self.standing = False
        super().schedule(step)
        self.standing = step._hold_until_ns is not None

    def observe(self, event):
        if isinstance(event, (Finished, Aborted, Preempted)):
            self.standing = False


@dataclass
class PingPong(Sound):
    """Whoever waits with the same priority, or a higher one, throws out who runs; only the higher one should."""

    mode: str = "recompute"

    def schedule(self, step):
        victims = [request for request in step.running if self._loses(request, step)]
        for victim in victims[:1]:
            step.preempt(victim, self.mode)
        if not victims:
            super().schedule(step)
        elif not admit(step, step.waiting, step.token_budget):
            decode_all(step)
            continue_prefills(step, step.token_budget)

    def _loses(self, request, step):
        return not step.free_slots and any(other.priority >= request.priority for other in step.waiting)


class RanksOnArrival(Sound):
    """Longest cached prefix first, as it was when the request came."""

    def __init__(self):
        self.ranks = {}

    def order(self, step):
        for request in step.waiting:
            self.ranks.setdefault(request, -step.cached_tokens(request))
        return sorted(step.waiting, key=self.ranks.__getitem__)


class DropsCacheChanges(RanksOnArrival):
    """Reads what changed in every step, and uses it only where a slot is free."""

    def schedule(self, step):
        changed = step.cache_changed
        for request in changed if step.free_slots else ():
            self.ranks[request] = -step.cached_tokens(request)
        super().schedule(step)


class KnowsTheLength(Sound):
    def order(self, step):
        return sorted(step.waiting, key=lambda request: request.recorded_output_tokens or 0)


class GlobalRandom(Sound):
    def order(self, step):
        return random.sample(list(step.waiting), len(step.waiting))


class OwnSeedlessRandom(Sound):
    def __init__(self):
        self.random = random.Random()

    def order(self, step):
        return self.random.sample(list(step.waiting), len(step.waiting))


class SharedState(Sound):
    """What it counts is kept on the class, so a second run starts where the first one ended."""

    finished: ClassVar[list[str]] = []

    def order(self, step):
        waiting = list(step.waiting)
        return waiting[::-1] if len(self.finished) % 2 else waiting

    def observe(self, event):
        if isinstance(event, Finished):
            self.finished.append(event.request.request_id)


class KeepsTheStep(Sound):
    def __init__(self):
        self.last = None

    def schedule(self, step):
        if self.last is not None and self.last.token_budget:
            pass
        self.last = step
        super().schedule(step)


class NapsForEver(Policy):
    """Waits for better times that never come."""

    def schedule(self, step):
        step.idle_until(step.now + 0.001)


class CrashesWhenNobodyDecodes(Sound):
    def schedule(self, step):
        self.newest = step.decoding[-1] if len(step.waiting) < 3 else None
        super().schedule(step)


class PromptsFirst(Sound):
    """Decodes only where no prompt is left, and does not say so."""

    def schedule(self, step):
        chunks = continue_prefills(step, step.token_budget)
        chunks += admit(step, step.waiting, step.token_budget)
        if not chunks and decode_all(step):
            step.hold()


class HoldsBesideAChunk(Sound):
    def schedule(self, step):
        decode_all(step)
        chunks = continue_prefills(step, step.token_budget) + admit(step, step.waiting, step.token_budget)
        if step.decoding or not chunks:
            step.hold()


class SkipsTheUnfit(Sound):
    """Passes over a head that does not fit, for ever."""

    def order(self, step):
        return [request for request in step.waiting if fits_whole(step, request)]


class RestsOnTheClock(Sound):
    """Holds without an end although its order changes with time."""

    def order(self, step):
        return sorted(step.waiting, key=lambda r: (step.now - r.arrival_s < 0.02, r.num_prompt_tokens))


@dataclass
class TouchesTheBooks(Sound):
    """Takes a block for later."""

    kept: list = field(default_factory=list)

    def schedule(self, step):
        super().schedule(step)
        free = step._books.pool.free
        if free and not self.kept:
            self.kept.append(free.pop())


class ForgotToAskForPredictions(Sound):
    def order(self, step):
        return sorted(step.waiting, key=lambda request: request.predicted_output_tokens)


class CountsOnALimit(Sound):
    """Takes it that whoever has an objective has a limit of the first token in it."""

    def order(self, step):
        return sorted(step.waiting, key=lambda request: request.slo.ttft_s if request.slo else 9.0)


class HasSixtyFourPlaces(Sound):
    def order(self, step):
        places = list(range(64))
        return [request for i, request in enumerate(step.waiting) if places[i] >= 0]


class TiresAfterFiveMinutes(Sound):
    def schedule(self, step):
        if step.now < 300:
            super().schedule(step)


class KnowsTwoClients(Sound):
    weights: ClassVar[dict[str, int]] = {"default": 1, "b": 2}

    def order(self, step):
        return sorted(step.waiting, key=lambda request: self.weights[request.client])


class RemembersEverybody(Sound):
    def __init__(self):
        self.ended = []

    def observe(self, event):
        if isinstance(event, Finished):
            self.ended.append(event.request.request_id)


@dataclass
class TurnsItsKnob(Sound):
    patience: int = 4

    def order(self, step):
        self.patience += 1
        return step.waiting


class ReadsThroughTheClass(Sound):
    def order(self, step):
        return sorted(step.waiting, key=lambda r: type(r).recorded_output_tokens.__get__(r) or 0)


class StartsAThread(Sound):
    def __init__(self):
        self.timer = None

    def schedule(self, step):
        if self.timer is None:
            self.timer = threading.Timer(1.0, int)
            self.timer.daemon = True
            self.timer.start()
        super().schedule(step)


class RunsWildBesideLongPrompts(Sound):
    """Grants twice, where a prompt is longer than any of the short traces."""

    def schedule(self, step):
        super().schedule(step)
        if step.decoding and any(request.num_prompt_tokens > 300 for request in step.running):
            step.grant(step.decoding[0])


NAMED = {
    OverrunsTheBudget: ("audit", "budget"),
    ShortestFirst: ("waiting", "a long prompt among short ones"),
    StartsOver: ("churn", "and admitted again"),
    StickyFull: ("stalls", "granted nothing"),
    ForgetsRefusedDecodes: ("stalls", "0 blocks are free"),
    OrderOfASet: ("determinism", "hash of a name"),
    WallClock: ("inputs", "time.monotonic()"),
    GrantsThePreempted: ("rules", "was preempted in this step and cannot be granted in it"),
    WaitsWithoutIdling: ("stalls", "did not idle"),
    HoldsAcrossArrivals: ("hold", "asked at every step"),
    PingPong: ("churn", "in turns with"),
    RanksOnArrival: ("cache", "while requests wait"),
}
"""The property that must fail for each, and what must be said."""

BLIND = {
    ForgotToAskForPredictions: ("rules", "TypeError"),
    CountsOnALimit: ("rules", "TypeError"),
    HasSixtyFourPlaces: ("rules", "IndexError"),
    TiresAfterFiveMinutes: ("stalls", "granted nothing"),
    KnowsTwoClients: ("rules", "KeyError"),
    RemembersEverybody: ("memory", "requests that have ended"),
    TurnsItsKnob: ("rules", "changed its own knob patience"),
    ReadsThroughTheClass: ("inputs", "of a request's class"),
    StartsAThread: ("inputs", "started a thread"),
}
"""Faults that only less usual traffic, or a look at the policy itself, brings out."""

MORE = {
    FullUntilAFinish: ("stalls", "granted nothing"),
    AdmitsOneChunk: ("churn", "was preempted"),
    OrderOfAddresses: ("determinism", ""),
    HoldsUntilAFinish: ("waiting", "beside endless answers"),
    DropsCacheChanges: ("cache", "while requests wait"),
    KnowsTheLength: ("inputs", "recorded_output_tokens"),
    GlobalRandom: ("inputs", "global random generator"),
    OwnSeedlessRandom: ("determinism", ""),
    SharedState: ("determinism", ""),
    KeepsTheStep: ("rules", "after its schedule returned"),
    NapsForEver: ("livelock", "idled"),
    CrashesWhenNobodyDecodes: ("rules", "IndexError"),
    PromptsFirst: ("gap", "the next token"),
    HoldsBesideAChunk: ("rules", "hold is legal only"),
    SkipsTheUnfit: ("waiting", "a prompt of half the pool"),
    RestsOnTheClock: ("hold", "asked at every step"),
    TouchesTheBooks: ("audit", ""),
}
