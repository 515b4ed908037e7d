"""The step transaction, row by row of its contract: what a policy sees, what its verbs do, which rules name it."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import HOST_BLOCK_GIB, MS, Script, books, grants, ids, lab, named, serve

from schedlab.framework.errors import PolicyError, PolicyStalled
from schedlab.framework.policy import Admitted, Arrived, Policy, Preempted, Progressed
from schedlab.framework.step import Grant
from schedlab.framework.testing.harness import Spec, check_streams, run
from schedlab.framework.testing.strategies import limits, specs

# -- a population in every place -----------------------------------------------------------------------------------------


def populated(*moves, then=None, **keys):
    """d1 and d2 decode (8 + 1 tokens in blocks of 4), p1 and p2 are half prefilled (4 of 12), w1 and w2 wait.

    24 blocks: 2 + 2 for the decodes, 1 + 1 for the prompts, 18 free. 6 slots: 2 free. `moves` decide from here on.
    """
    trace = [Spec(name, 0, 8, 8) for name in ("d1", "d2")]
    trace += [Spec(name, 0, 12, 4) for name in ("p1", "p2")] + [Spec(name, 0, 10, 4) for name in ("w1", "w2")]
    made = lab(Script(grants(d1=None, d2=None), grants(p1=4, p2=4), *moves, then=then), trace, **keys)
    made.step(2)
    return made


VIEWS = {"waiting": ["w1", "w2"], "running": ["d1", "d2", "p1", "p2"], "prefilling": ["p1", "p2"], "decoding": ["d1", "d2"]}


def checked(made):
    """Run the moves that are left; each must have been made."""
    made.step()
    made.finish()
    check_all_tokens(made)


def check_all_tokens(made):
    class Outcome:
        engine, requests = made.engine, list(made.requests.values())

    check_streams(Outcome)


# -- views ----------------------------------------------------------------------------------------------------------------


def test_the_views_partition_the_requests():
    seen = {}

    def look(step):
        seen.update({name: ids(getattr(step, name)) for name in VIEWS})
        serve(step)

    checked(populated(look))
    assert seen == VIEWS


VERBS = {
    "grant a decode": lambda step, r: step.grant(r["d2"]),
    "grant a chunk": lambda step, r: step.grant(r["p1"], 2),
    "admit": lambda step, r: step.grant(r["w1"], 3),
    "admit the second": lambda step, r: step.grant(r["w2"]),
    "decode all": lambda step, r: step.grant_decodes(),
    "preempt a decode": lambda step, r: step.preempt(r["d1"]),
    "swap out a decode": lambda step, r: step.preempt(r["d2"], "swap"),
    "preempt a prompt": lambda step, r: step.preempt(r["p1"]),
    "swap out a prompt": lambda step, r: step.preempt(r["p2"], "swap"),
    "take back an admission": lambda step, r: (step.grant(r["w1"], 3), step.preempt(r["w1"])),
    "take back a decode": lambda step, r: (step.grant(r["d1"]), step.preempt(r["d1"])),
    "preempt after decode all": lambda step, r: (step.grant_decodes(), step.preempt(r["d2"])),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("when", ["views taken before", "views taken after"])
def test_views_stay_as_they_were_at_the_start_of_the_step(verb, when):
    def move(step):
        requests = named(step)
        before = {name: getattr(step, name) for name in VIEWS} if when == "views taken before" else {}
        VERBS[verb](step, requests)
        views = before or {name: getattr(step, name) for name in VIEWS}
        assert {name: ids(view) for name, view in views.items()} == VIEWS
        for name, view in views.items():
            assert len(view) == len(VIEWS[name]) and ids(view[:1]) == VIEWS[name][:1]
        if step.token_budget == 32:
            step.idle_until(step.now + 0.001)

    checked(populated(move, swap_space_gib=8 * HOST_BLOCK_GIB))


@pytest.mark.parametrize("view", ["running", "decoding", "prefilling"])
def test_a_policy_may_preempt_what_it_walks_over(view):
    met = []

    def move(step):
        for request in getattr(step, view):
            met.append(request.request_id)
            step.preempt(request)
        assert step.grant(named(step)["w1"])

    made = populated(move)
    made.step()
    assert met == VIEWS[view]


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_only(view):
    def move(step):
        seen = getattr(step, view)
        with pytest.raises((TypeError, AttributeError)):
            seen[0] = seen[-1]
        with pytest.raises((TypeError, AttributeError)):
            seen.append(seen[0])
        serve(step)

    checked(populated(move))


def test_requests_are_read_only():
    def move(step):
        for name in ("state", "priority", "num_tokens", "num_computed_tokens", "max_tokens", "arrival_s", "slo"):
            with pytest.raises(AttributeError):
                setattr(step.waiting[0], name, 1)
        serve(step)

    checked(populated(move))


class Watching(Policy):
    """Decides at random through another policy; checks at the start of each step what the views must be."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._arrived, self._admitted, self._emitted = [], [], set()
        self.steps = 0

    def observe(self, event):
        if isinstance(event, Arrived):
            self._arrived.append(event.request)
        elif isinstance(event, Admitted):
            self._admitted.append(event.request)
        elif isinstance(event, Preempted):
            self._admitted.remove(event.request)
        elif isinstance(event, Progressed):
            self._emitted.update(r.request_id for r in event.decodes)

    def schedule(self, step):
        self.steps += 1
        alive = [r for r in self._arrived if r.state in ("waiting", "preempted", "swapped", "running")]
        running = [r for r in self._admitted if r.state == "running"]
        assert list(step.waiting) == [r for r in alive if r.state != "running"], "waiting: arrival order"
        assert list(step.running) == running, "running: admission order"
        decoding = [r for r in running if r.num_tokens - r.num_computed_tokens == 1 and r.num_output_tokens >= 1]
        assert list(step.decoding) == decoding
        assert list(step.prefilling) == [r for r in running if r not in decoding]
        assert all((r.first_token_s is not None) == (r.num_output_tokens > 0) for r in alive)
        assert all(r.num_tokens == r.num_prompt_tokens + r.num_output_tokens for r in alive)
        assert all(r.num_uncomputed_tokens == r.num_tokens - r.num_computed_tokens for r in alive)
        self._decide(step)

    def _decide(self, step):
        before, dice = step.token_budget, self._random
        for request in dice.sample(list(step.running), len(step.running)):
            if dice.random() < 0.15 and len(step.running) > 1:
                step.preempt(request, dice.choice(["recompute", "swap"]))
        for request in dice.sample([*step.running, *step.waiting], len(step.running) + len(step.waiting)):
            if dice.random() < 0.7 and (fits := step.fits(request)):
                assert step.grant(request, dice.choice([fits, dice.randint(1, fits)]))
        if step.token_budget == before:
            step.idle_until(step.now + 0.001)


@given(specs(), limits(), st.integers(0, 2**32))
def test_views_hold_what_they_promise_in_their_order(trace, keys, seed):
    policy = Watching(seed)
    check_streams(run(policy, trace, **keys))


# -- numbers that a policy reads, against what its verbs then do ------------------------------------------------------------


class Surveyor(Policy):
    """At random moments compares every number that a step offers with what a grant then does to the books."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self.engine = None
        self._started = {}

    def observe(self, event):
        if isinstance(event, Admitted):
            assert event.cached_tokens == self._started.pop(event.request.request_id)

    def schedule(self, step):
        dice, before = self._random, step.token_budget
        self._touched = set()
        self._computing = {r: r for r in step.running}
        if dice.random() < 0.3:
            for request in step.grant_decodes():
                assert step.fits(request) == 0, "refused although it fits"
            self._touched.update(step.decoding)
        for _ in range(dice.randint(1, 6)):
            self._preempt(step) if dice.random() < 0.2 else self._survey(step)
        if step.token_budget == before:
            step.idle_until(step.now + 0.001)

    def _survey(self, step):
        requests = [r for r in [*step.waiting, *step.running] if r not in self._touched]
        if not requests:
            return
        request = self._random.choice(requests)
        waits = request.state != "running"
        fits, start = step.fits(request), step.cached_tokens(request)
        left = request.num_tokens - start
        assert 0 <= start <= request.num_tokens - 1
        assert request.state not in ("running", "swapped") or start >= request.num_computed_tokens
        assert 0 <= fits <= min(left, step.token_budget)
        if waits:
            assert step.pending_tokens(request) == self._pending(step, request, start)
        self._one_more(step, request, fits)
        tokens = self._random.randint(1, fits) if fits and self._random.random() < 0.5 else fits
        if tokens and request not in self._touched:
            self._grant(step, request, tokens, waits, start)

    def _one_more(self, step, request, fits):
        """One token more than fits is clamped by the budget or by what is left, or refused for want of blocks."""
        if self._random.random() < 0.5:
            return
        before, budget = books(self.engine), step.token_budget
        limited = fits in (request.num_tokens - step.cached_tokens(request), step.token_budget)
        if fits and limited:
            return  # the clamped grant is what `_grant` makes
        result = step.grant(request, fits + 1)
        assert not result and result.tokens == 0
        reasons = {"slots": step.free_slots == 0, "budget": step.token_budget == 0, "memory": True}
        assert reasons[result.refusal], f"refused for {result.refusal}"
        assert step.token_budget == budget and books(self.engine) == before, "a refusal left a trace"

    def _grant(self, step, request, tokens, waits, start):
        limited = tokens in (request.num_tokens - start, step.token_budget)
        need = step.blocks_needed(request, tokens)
        budget, slots, blocks = step.token_budget, step.free_slots, step.free_blocks
        asked = tokens + 1 if limited else tokens
        assert step.grant(request, asked) == Grant(tokens)
        assert step.token_budget == budget - tokens
        assert step.free_slots == slots - waits
        assert step.free_blocks == blocks - need
        assert step.cached_tokens(request) == start, "the start of a grant moved"
        self._touched.add(request)
        self._computing[request] = request
        if waits:
            self._started[request.request_id] = start

    def _preempt(self, step):
        victims = [r for r in step.running if r.state == "running"]
        if not victims:
            return
        victim = self._random.choice(victims)
        slots, blocks = step.free_slots, step.free_blocks
        mode = step.preempt(victim, self._random.choice(["recompute", "swap"]))
        assert step.free_slots == slots + 1 and step.free_blocks >= blocks
        assert victim.state == ("swapped" if mode == "swap" else "preempted")
        assert victim.num_computed_tokens == 0 or mode == "swap"
        self._touched.add(victim)
        self._computing.pop(victim, None)

    def _pending(self, step, request, start):
        """Whole blocks that follow the hit and are blocks of the prompt of somebody who runs."""
        size, caching = self.engine.config.block_size, self.engine.config.enable_prefix_caching
        if not caching:
            return 0
        hit = self.engine.ledger.cache.hit_blocks(request)
        mine = prompt_blocks(request, size)
        others = {key for other in self._computing for key in prompt_blocks(other, size)}
        reach = hit
        while reach < min(len(mine), (request.num_tokens - 1) // size) and mine[reach] in others:
            reach += 1
        return (reach - hit) * size


def prompt_blocks(request, size):
    """A name for each whole block of the prompt, equal for equal content after equal content."""
    content = request.content
    if not content.has_identity:
        return []
    count = request.num_prompt_tokens
    names = []
    for block in range(count // size):
        last = ((block + 1) * size - 1) // content.width  # the id that holds the block's last token
        width = min(content.width, count - last * content.width)
        names.append((tuple(content.ids[: last + 1]), width, block))
    return names


@given(specs(), limits(), st.integers(0, 2**32))
def test_what_a_step_says_is_what_its_verbs_do(trace, keys, seed):
    policy = Surveyor(seed)
    made = lab(policy, sorted(trace, key=lambda spec: spec.arrival_ns), **keys)
    policy.engine = made.engine
    made.finish()
    check_all_tokens(made)


def test_a_grant_clamps_to_the_tokens_left_the_budget_and_the_maximum():
    def move(step):
        r = named(step)
        assert step.grant(r["w1"], 3) == Grant(3)
        assert step.grant(r["p1"], 100) == Grant(8), "what is left"
        assert step.grant(r["d1"], 100) == Grant(1)
        assert step.token_budget == 16 - 3 - 8 - 1
        assert step.grant(r["p2"]) == Grant(4), "what the budget leaves"
        assert step.token_budget == 0
        assert step.grant(r["w2"]) == Grant(0, "budget")
        assert step.fits(r["w2"]) == 0

    checked(populated(move, max_num_batched_tokens=16, max_num_seqs=6))


def test_budget_fits_and_maximum_never_count_the_hit():
    """A hit of 20 tokens is free: a budget of 6 grants the 6 tokens behind it."""
    shared = tuple(range(10))
    trace = [Spec("a", 0, 30, 1, ids=shared[:7] + (70, 71), id_width=4)]
    trace += [Spec("b", 30 * MS, 40, 1, ids=shared, id_width=4)]
    seen = {}

    def look(step):
        (b,) = step.waiting
        seen["start"], seen["fits"] = step.cached_tokens(b), step.fits(b)
        assert step.blocks_needed(b, 6) == 7 + 2, "the hit's blocks are owned by nobody, and then two more"
        assert step.grant(b, 100) == Grant(6)

    made = lab(Script(*[serve] * 5, look), trace, max_num_batched_tokens=6, max_num_seqs=2)
    made.finish()
    assert seen == {"start": 28, "fits": 6}


@pytest.mark.parametrize("missing", ["slots", "memory", "budget"])
def test_a_refusal_says_why_and_leaves_no_trace(missing):
    keys = {"slots": {"max_num_seqs": 4}, "memory": {"num_blocks": 7}, "budget": {"max_num_batched_tokens": 16}}[missing]

    def move(step):
        r = named(step)
        if missing == "budget":
            assert step.grant(r["p1"]) and step.grant(r["p2"])
        before, budget = books(made.engine), step.token_budget
        for request in (r["w1"], r["w2"]):
            assert step.grant(request) == Grant(0, missing)
            assert not step.grant(request, 8), "again, and smaller"
            assert step.fits(request) == (4 if missing == "memory" else 0)
        assert books(made.engine) == before and step.token_budget == budget
        serve(step) if missing != "budget" else None

    made = populated(move, **keys)
    checked(made)


def test_a_hit_that_a_later_grant_evicts_is_gone_when_it_is_read_again():
    """b's hit is two blocks nobody owns; granting c takes the whole pool, so b then starts at 0."""
    trace = [Spec("a", 0, 8, 1, ids=(1, 2), id_width=4)]
    trace += [Spec("b", 30 * MS, 12, 1, ids=(1, 2, 3), id_width=4), Spec("c", 30 * MS, 20, 1)]
    seen = []

    def move(step):
        b, c = step.waiting
        seen.append(step.cached_tokens(b))
        assert step.grant(c)
        seen.append(step.cached_tokens(b))
        assert step.fits(b) == 0

    made = lab(Script(grants(a=None), move), trace, num_blocks=5)
    made.finish()
    assert seen == [8, 0]


def test_reading_a_hit_does_not_touch_its_recency():
    """a and b leave a block each, a's older; reading a's for ever does not save it when one must go."""
    trace = [Spec("a", 0, 4, 1, ids=(1,), id_width=4), Spec("b", 10 * MS, 4, 1, ids=(2,), id_width=4)]
    trace += [Spec(f"{name}2", 20 * MS, 8, 1, ids=(i, 9), id_width=4) for i, name in ((1, "a"), (2, "b"))]
    trace += [Spec("c", 20 * MS, 12, 1)]
    seen = []

    def move(step):
        a2, b2, c = step.waiting
        for _ in range(5):
            step.cached_tokens(b2), step.cached_tokens(a2), step.fits(a2), step.pending_tokens(a2)
        step.grant(c)
        seen.extend([step.cached_tokens(a2), step.cached_tokens(b2)])

    made = lab(Script(serve, serve, move), trace, num_blocks=4)
    made.finish()
    assert seen == [0, 4]


# -- cache_changed ----------------------------------------------------------------------------------------------------------


class ChangeReader(Watching):
    """Reads `cache_changed` first in each step and compares it with a full comparison of all hits."""

    def __init__(self, seed):
        super().__init__(seed)
        self._hits, self._asked, self._fresh = {}, set(), set()

    def observe(self, event):
        super().observe(event)
        if isinstance(event, (Arrived, Preempted)):
            self._fresh.add(event.request)

    def schedule(self, step):
        if self._random.random() < 0.3:
            return self._decide(step)  # changes add up until they are read
        changed = list(step.cache_changed)
        now = {request: step.cached_tokens(request) for request in step.waiting}
        must = [r for r in step.waiting if r in self._fresh or self._hits.get(r) != now[r]]
        assert [r for r in changed if r in must] == must, "missed a change, or out of arrival order"
        assert all(r in must or r in self._asked for r in changed), "reported a hit that never changed"
        assert list(step.cache_changed) == changed, "a second reading in one step differs"
        self._hits, self._asked, self._fresh = now, set(), set()
        self._decide(step)

    def _decide(self, step):
        self._asked.update(step.waiting)  # a hit may change twice between two readings
        super()._decide(step)


class StillReader(ChangeReader):
    """The same, but grants without asking first, so that what is reported must be exactly what differs."""

    def _decide(self, step):
        before, dice = step.token_budget, self._random
        step.grant_decodes()
        for request in list(step.prefilling) + dice.sample(list(step.waiting), min(2, len(step.waiting))):
            if not step.grant(request, dice.randint(1, 8)):
                self._asked.add(request)
        if step.token_budget == before:
            for request in reversed(step.running[1:]):
                step.preempt(request)
            step.idle_until(step.now + 0.001)


@pytest.mark.parametrize("reader", [ChangeReader, StillReader])
@given(trace=specs(), keys=limits(), seed=st.integers(0, 2**32))
def test_cache_changed_names_exactly_the_waiting_requests_whose_hit_changed(reader, trace, keys, seed):
    run(reader(seed), trace, **keys)


# -- the rules of grant and preempt -------------------------------------------------------------------------------------------


def broken(move, rule, name=None, **keys):
    """`move` breaks a rule: the error names the policy, the request and the rule, in one line."""
    made = populated(move, **keys)
    with pytest.raises(PolicyError) as caught:
        made.engine.step()
    error = caught.value
    assert error.policy == "Script" and error.request_id == name
    assert rule in error.rule
    assert str(error).startswith("policy Script" + (f" on request {name}: " if name else ": ")) and "\n" not in str(error)
    return error


TWICE = {
    "chunk, chunk": ("p1", lambda s, r: (s.grant(r["p1"], 2), s.grant(r["p1"], 2))),
    "decode, decode": ("d1", lambda s, r: (s.grant(r["d1"]), s.grant(r["d1"]))),
    "admission, chunk": ("w1", lambda s, r: (s.grant(r["w1"], 2), s.grant(r["w1"], 2))),
    "all, one": ("d2", lambda s, r: (s.grant_decodes(), s.grant(r["d2"]))),
    "all, some": ("d2", lambda s, r: (s.grant_decodes(), s.grant_decodes([r["d2"]]))),
    "one, some": ("d1", lambda s, r: (s.grant(r["d1"]), s.grant_decodes([r["d1"]]))),
    "all, preemption, one": ("d2", lambda s, r: (s.grant_decodes(), s.preempt(r["d1"]), s.grant(r["d2"]))),
    "preemption, all, one": ("d2", lambda s, r: (s.preempt(r["d1"]), s.grant_decodes(), s.grant(r["d2"]))),
    "chunk, all, one": ("d2", lambda s, r: (s.grant(r["p1"], 1), s.grant_decodes(), s.grant(r["d2"]))),
}


@pytest.mark.parametrize("case", TWICE)
def test_a_second_grant_is_a_policy_error(case):
    name, verbs = TWICE[case]
    broken(lambda step: verbs(step, named(step)), "second grant", name)


@pytest.mark.parametrize("case", TWICE)
def test_what_is_granted_already_fits_no_more(case):
    name, verbs = TWICE[case]
    seen = []

    def move(step):
        requests = named(step)

        class Last:
            """Looks where the second grant would be."""

            def __getattr__(self, verb):
                return lambda *arguments: record(verb, arguments)

        def record(verb, arguments):
            calls.append((verb, arguments))
            return None

        calls = []
        verbs(Last(), requests)
        for verb, arguments in calls[:-1]:
            getattr(step, verb)(*arguments)
        seen.append(step.fits(requests[name]))

    checked(populated(move))
    assert seen == [0]


@pytest.mark.parametrize("name", ["d1", "p1", "w1"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_what_was_preempted_in_a_step_is_not_granted_in_it(name, mode):
    def move(step):
        request = named(step)[name]
        if name == "w1":
            step.grant(request, 2)
        step.preempt(request, mode)
        assert step.fits(request) == 0
        step.grant(request)

    broken(move, "preempted in this step", name, swap_space_gib=8 * HOST_BLOCK_GIB)


def test_only_a_running_request_can_be_preempted():
    broken(lambda step: step.preempt(step.waiting[0]), "only a running request", "w1")


def test_a_request_is_preempted_once_a_step():
    broken(lambda step: [step.preempt(step.decoding[0]) for _ in range(2)], "only a running request", "d1")


def test_an_admission_is_taken_back_once():
    def move(step):
        w1 = named(step)["w1"]
        step.grant(w1, 2)
        step.preempt(w1)
        step.preempt(w1)

    broken(move, "only a running request", "w1")


@pytest.mark.parametrize("name", ["p1", "w1"])
def test_grant_decodes_takes_decoding_requests_only(name):
    broken(lambda step: step.grant_decodes([named(step)[name]]), "decoding requests only", name)


def test_a_request_that_has_ended_cannot_be_granted():
    kept = []

    def keep(step):
        kept.append(named(step)["d1"])
        serve(step)

    def move(step):
        assert kept[0].state == "aborted"
        assert step.fits(kept[0]) == 0
        step.grant(kept[0])

    made = populated(keep, move)
    made.step()
    made.engine.abort("d1")
    with pytest.raises(PolicyError, match="policy Script on request d1: .*aborted"):
        made.engine.step()


# -- refunds ------------------------------------------------------------------------------------------------------------------


def spare(step):
    return step.token_budget, step.free_slots, step.free_blocks


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    "name, grant, blocks_owned",
    [
        ("d1", lambda step, r: step.grant(r["d1"]), 2),
        ("d1", lambda step, r: step.grant_decodes([r["d1"]]), 2),
        ("p1", lambda step, r: step.grant(r["p1"], 7), 1),
        ("p1", lambda step, r: step.grant(r["p1"]), 1),
        ("w1", lambda step, r: step.grant(r["w1"], 7), 0),
        ("w1", lambda step, r: step.grant(r["w1"]), 0),
    ],
)
def test_preemption_refunds_what_this_step_granted(name, grant, blocks_owned, mode):
    """Budget as before; the slot and every block come back, for a running request also those that it had before."""

    def move(step):
        requests = named(step)
        budget, slots, blocks = spare(step)
        assert grant(step, requests) is not None
        assert step.preempt(requests[name], mode) in ("recompute", mode)
        held = name != "w1"
        assert spare(step) == (budget, slots + held, blocks + blocks_owned)
        assert step.grant(requests["w2"])

    checked(populated(move, swap_space_gib=8 * HOST_BLOCK_GIB))


@pytest.mark.parametrize("order", [("all", "d2"), ("d2", "all"), ("all", "d2", "d1"), ("d1", "all", "d2")])
def test_preemption_refunds_the_token_of_a_bulk_decode(order):
    def move(step):
        requests, before = named(step), step.token_budget
        for verb in order:
            step.grant_decodes() if verb == "all" else step.preempt(requests[verb])
        left = 2 - sum(verb != "all" for verb in order)
        assert step.token_budget == before - left
        assert step.grant(requests["w1"])

    checked(populated(move))


def test_a_bulk_decode_after_preemptions_leaves_the_victims_out():
    def move(step):
        step.preempt(step.decoding[0])
        assert step.grant_decodes() == []
        assert step.token_budget == 31

    made = populated(move)
    made.step()
    assert [made[name].num_output_tokens for name in ("d1", "d2")] == [1, 2]
    checked(made)


def test_a_decode_at_a_block_boundary_gives_its_new_block_back():
    """d1 and d2 stand at 8 computed tokens: each next token takes a third block."""

    def move(step):
        blocks = step.free_blocks
        step.grant_decodes()
        assert step.free_blocks == blocks - 2
        step.preempt(named(step)["d2"])
        assert step.free_blocks == blocks - 1 + 2, "its new block and the two it had"

    checked(populated(move))


def test_taking_back_an_admission_leaves_it_waiting_as_it_was():
    def move(step):
        w1 = named(step)["w1"]
        before = books(made.engine)
        assert step.grant(w1) and step.preempt(w1)
        after = books(made.engine)
        for key in ("free", "slots", "copies", "host", "places", "computing", "requests"):
            assert sorted(after[key]) == sorted(before[key]) if key in ("free", "slots") else after[key] == before[key]
        assert w1.num_preemptions == 0 and w1.state == "waiting"
        assert step.grant(named(step)["w2"])

    made = populated(move)
    made.step()
    assert [e for e in made.policy.events if isinstance(e, Preempted)] == [], "it never ran"
    checked(made)


def test_taking_back_a_resumed_swap_leaves_it_swapped_and_uncopied():
    def swap_out(step):
        assert step.preempt(named(step)["d1"], "swap") == "swap"
        assert step.grant_decodes() == []

    def take_back(step):
        d1 = named(step)["d1"]
        assert d1.state == "swapped" and d1.num_computed_tokens == 8
        before = spare(step)
        assert step.cached_tokens(d1) == 8 and step.grant(d1) == Grant(1)
        assert step.preempt(d1) == "swap", "what it had is still on the host"
        assert spare(step) == before and d1.state == "swapped" and d1.num_computed_tokens == 8
        step.grant_decodes()

    made = populated(swap_out, take_back, swap_space_gib=2 * HOST_BLOCK_GIB)
    made.step(2)
    assert made["d1"].num_preemptions == 1
    tables = made.finish()
    check_all_tokens(made)
    assert tables.summary["preemptions/swap"] == 1


@pytest.mark.parametrize("host_blocks, modes", [(0, ["recompute"] * 2), (2, ["swap", "recompute"]), (4, ["swap", "swap"])])
def test_a_swap_into_a_full_host_pool_is_a_counted_recompute(host_blocks, modes):
    def move(step):
        r = named(step)
        assert [step.preempt(r["d1"], "swap"), step.preempt(r["d2"], "swap")] == modes
        step.grant(r["w1"])

    made = populated(move, swap_space_gib=host_blocks * HOST_BLOCK_GIB)
    made.step()
    states = ["swapped" if mode == "swap" else "preempted" for mode in modes]
    assert [made[name].state for name in ("d1", "d2")] == states
    told = [(e.request.request_id, e.mode) for e in made.policy.events if isinstance(e, Preempted)]
    assert told == list(zip(("d1", "d2"), modes, strict=True))
    tables = made.finish()
    check_all_tokens(made)
    assert tables.summary["preemptions/swap"] == modes.count("swap")
    assert tables.summary["preemptions/recompute"] == modes.count("recompute")
    assert tables.decisions["preempted"][2] == [[name, mode] for name, mode in told]


# -- grant_decodes ------------------------------------------------------------------------------------------------------------


def decoding_six(*moves, **keys):
    """Six requests of 8 prompt tokens that each stand before their first decode, which takes a block of 4."""
    keys = {"num_blocks": 14, "max_num_batched_tokens": 64, **keys}
    made = lab(Script(grants(**{f"r{i}": None for i in range(6)}), *moves), [Spec(f"r{i}", 0, 8, 6) for i in range(6)], **keys)
    made.step()
    return made


def test_grant_decodes_refuses_in_order_what_lacks_a_block():
    def move(step):
        assert step.free_blocks == 2
        assert ids(step.grant_decodes()) == ["r2", "r3", "r4", "r5"]
        assert step.free_blocks == 0 and step.token_budget == 62
        assert ids(step.decoding) == [f"r{i}" for i in range(6)], "refused decodes stay"

    made = decoding_six(move)
    made.step()
    assert [made[f"r{i}"].num_output_tokens for i in range(6)] == [2, 2, 1, 1, 1, 1]
    assert made.tables().decisions["refusals"][1] == [[f"r{i}", "memory"] for i in range(2, 6)]
    checked(made)


def test_who_needs_no_block_is_not_refused_behind_one_who_does():
    """r0 decodes alone first, so it needs no block when only r1 .. r5 do and two are free."""

    def later(step):
        assert step.free_blocks == 1
        assert ids(step.grant_decodes()) == ["r2", "r3", "r4", "r5"]

    made = decoding_six(grants(r0=1), later)
    made.step(2)
    assert [made[f"r{i}"].num_output_tokens for i in range(6)] == [3, 2, 1, 1, 1, 1]
    checked(made)


def test_grant_decodes_refuses_in_order_what_lacks_budget():
    def move(step):
        assert step.grant(named(step)["w"], 5)
        assert ids(step.grant_decodes()) == ["r3"]
        assert step.token_budget == 0

    trace = [Spec(f"r{i}", 0, 2, 6) for i in range(4)] + [Spec("w", 0, 12, 2)]
    first = grants(r0=None, r1=None, r2=None, r3=None)
    made = lab(Script(first, move), trace, max_num_batched_tokens=8)
    made.step(2)
    assert [made[f"r{i}"].num_output_tokens for i in range(4)] == [2, 2, 2, 1]
    assert made.tables().decisions["refusals"][1] == [["r3", "budget"]]
    checked(made)


def test_grant_decodes_of_some_decodes_these_in_their_order():
    def move(step):
        r = named(step)
        assert step.grant_decodes([r["r4"], r["r1"]]) == []

    made = decoding_six(move, num_blocks=20)
    made.step()
    assert made.tables().decisions["decodes"][1] == ["r4", "r1"]
    checked(made)


def test_grant_decodes_never_preempts():
    def move(step):
        for request in step.grant_decodes():
            assert request.state == "running" and request.num_preemptions == 0

    checked(decoding_six(move))


def test_the_batch_has_the_order_of_the_grants():
    def move(step):
        r = named(step)
        for name in ("p2", "d2", "w1", "d1", "p1"):
            assert step.grant(r[name], 2)

    made = populated(move)
    made.step()
    rest = made.tables().decisions
    order, at = [name for name, _ in rest["grants"][2]], rest["decodes_at"][2]
    assert order[:at] + list(rest["decodes"][2]) + order[at:] == ["p2", "d2", "w1", "d1", "p1"]
    checked(made)


# -- idle, hold, stall ----------------------------------------------------------------------------------------------------------


def idling(*moves, trace=(Spec("a", 0, 4, 2),), **keys):
    return lab(Script(*moves), trace, **keys)


@pytest.mark.parametrize(
    "wake, until, trace",
    [
        (5 * MS, 0.005, (Spec("a", 0, 4, 2),)),
        (5 * MS, 0.005, (Spec("a", 0, 4, 2), Spec("b", 8 * MS, 4, 2))),
        (3 * MS, 0.005, (Spec("a", 0, 4, 2), Spec("b", 3 * MS, 4, 2))),
        (3 * MS, math.inf, (Spec("a", 0, 4, 2), Spec("b", 3 * MS, 4, 2))),
        (2 * MS, 0.005, (Spec("a", 0, 4, 2), Spec("c", 0, 4, 2, abort_ns=2 * MS), Spec("b", 3 * MS, 4, 2))),
        (2 * MS, math.inf, (Spec("a", 0, 4, 2), Spec("c", 0, 4, 2, abort_ns=2 * MS))),
    ],
)
def test_idling_ends_at_its_time_an_arrival_or_an_abort(wake, until, trace):
    woke = []

    def look(step):
        woke.append(step.now)
        serve(step)

    idling(lambda step: step.idle_until(until), look, trace=trace).finish()
    assert woke == [wake / 1e9]


def test_an_idle_step_grants_nothing():
    broken(lambda step: (step.grant_decodes(), step.idle_until(step.now + 1)), "idle_until")
    broken(lambda step: (step.idle_until(step.now + 1), step.grant(step.prefilling[0])), "idle_until")


@pytest.mark.parametrize("until", [0.0, -1.0, -math.inf])
def test_idling_into_the_past_is_a_stall(until):
    with pytest.raises(PolicyStalled, match="policy Script: idle_until"):
        idling(lambda step: step.idle_until(until)).finish()


def test_idling_for_ever_with_nothing_to_wake_it_is_a_stall():
    with pytest.raises(PolicyStalled, match="never wakes"):
        idling(lambda step: step.idle_until(math.inf)).finish()
    with pytest.raises(PolicyStalled, match="never wakes"):
        idling(lambda step: step.idle_until()).finish()


def test_preemptions_of_an_idle_step_stand_and_are_copied():
    def move(step):
        assert step.preempt(named(step)["d1"], "swap") == "swap"
        step.preempt(named(step)["p1"])
        step.idle_until(step.now + 0.010)

    made = populated(move, swap_space_gib=2 * HOST_BLOCK_GIB)
    began = made.engine.now_ns
    made.step()
    assert made.engine.now_ns == began + 10 * MS
    assert (made["d1"].state, made["p1"].state) == ("swapped", "preempted")
    assert ids(made.engine.ledger.waiting) == ["d1", "p1", "w1", "w2"], "arrival order"
    checked(made)


def test_doing_nothing_is_a_stall_that_names_the_head_and_what_it_lacks():
    made = populated(lambda step: None)
    with pytest.raises(PolicyStalled, match=r"policy Script.*d1.*1 tokens.*2 slots.*18 blocks"):
        made.engine.step()
    waiting = lab(Script(lambda step: None), [Spec("a", 0, 10, 2)])
    with pytest.raises(PolicyStalled, match=r"policy Script.*request a.*10 tokens.*6 slots.*24 blocks"):
        waiting.engine.step()


def test_refusals_alone_are_a_stall():
    def move(step):
        assert not step.grant(step.waiting[0], 0)

    with pytest.raises(PolicyStalled, match="request a"):
        lab(Script(move), [Spec("a", 0, 10, 2)]).engine.step()


def test_preempting_without_granting_or_idling_is_a_stall():
    with pytest.raises(PolicyStalled):
        populated(lambda step: [step.preempt(request) for request in step.running]).engine.step()


HOLDS = {
    "a chunk too": lambda s, r: (s.grant_decodes(), s.grant(r["p1"], 1), s.hold()),
    "an admission too": lambda s, r: (s.grant_decodes(), s.grant(r["w1"], 1), s.hold()),
    "a preemption too": lambda s, r: (s.preempt(r["p1"]), s.grant_decodes(), s.hold()),
    "a decode preempted": lambda s, r: (s.grant_decodes(), s.preempt(r["d2"]), s.hold()),
    "one decode left out": lambda s, r: (s.grant(r["d1"]), s.hold()),
    "only chunks": lambda s, r: (s.grant(r["p1"], 1), s.hold()),
    "said before the chunk": lambda s, r: (s.grant_decodes(), s.hold(), s.grant(r["p1"], 1)),
    "with a time": lambda s, r: (s.grant(r["d1"]), s.hold(s.now + 1)),
    "while idling": lambda s, r: (s.idle_until(s.now + 1), s.hold()),
}


@pytest.mark.parametrize("case", HOLDS)
@pytest.mark.parametrize("honoured", [True, False])
def test_hold_is_legal_only_for_all_of_decoding_and_nothing_else(case, honoured):
    broken(lambda step: HOLDS[case](step, named(step)), "hold", honour_holds=honoured)


def test_idling_with_nobody_decoding_is_no_decision_that_stands():
    with pytest.raises(PolicyError, match="hold"):
        idling(lambda step: (step.idle_until(step.now + 1), step.hold())).engine.step()


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_held_decision_is_not_asked_again_until_it_ends(fast_forward):
    """Two requests of 5 and 9 tokens: asked for the prefill, the first decode, and after the first finish."""
    asked = []

    def then(step):
        asked.append(step.now)
        step.grant_decodes()
        step.hold()

    trace = [Spec("a", 0, 4, 5), Spec("b", 0, 4, 9)]
    made = lab(Script(grants(a=None, b=None), then=then), trace, fast_forward=fast_forward)
    made.finish()
    assert len(asked) == 2
    check_all_tokens(made)


@pytest.mark.parametrize("ends", ["until", "arrival", "abort", "shortage"])
def test_a_hold_ends_where_it_must(ends):
    """Steps of 1 ms and 10 us a token. Decoding starts at 1.04 ms; a step of one decode takes 1.01 ms."""
    asked = []

    def then(step):
        asked.append(round(step.now * 1000, 2))
        for waiting in step.waiting:
            if step.fits(waiting) == waiting.num_tokens:
                step.grant(waiting)
        if step.grant_decodes():
            step.preempt(step.decoding[-1])
        elif step.token_budget == 32 - 1 and not step.waiting:
            step.hold(0.005 if ends == "until" and step.now < 0.005 else None)

    trace, keys = [Spec("a", 0, 4, 12)], {}
    if ends == "arrival":
        trace += [Spec("b", 4 * MS, 4, 1)]
    if ends == "abort":
        trace = [Spec("a", 0, 4, 12, abort_ns=4 * MS)]
    if ends == "shortage":
        keys = {"num_blocks": 4}
        trace = [Spec("a", 0, 4, 12)]
    made = lab(Script(grants(a=None), then=then), trace, **keys)
    made.finish()
    boundaries = [1.04, *(round(1.04 + 1.01 * (i + 1), 2) for i in range(12))]
    first = {"until": 5.08, "arrival": 4.07, "abort": None, "shortage": None}[ends]
    assert asked[0] == 1.04 and all(t in boundaries or t > first for t in asked)
    assert asked[1:2] == ([first] if first else [])
    assert made["a"].state == ("aborted" if ends == "abort" else "finished")


# -- a dead step ------------------------------------------------------------------------------------------------------------------


MEMBERS = {
    "now": lambda s, r: s.now,
    "waiting": lambda s, r: s.waiting,
    "running": lambda s, r: s.running,
    "prefilling": lambda s, r: s.prefilling,
    "decoding": lambda s, r: s.decoding,
    "token_budget": lambda s, r: s.token_budget,
    "free_slots": lambda s, r: s.free_slots,
    "free_blocks": lambda s, r: s.free_blocks,
    "cache_changed": lambda s, r: s.cache_changed,
    "cached_tokens": lambda s, r: s.cached_tokens(r["w1"]),
    "pending_tokens": lambda s, r: s.pending_tokens(r["w1"]),
    "fits": lambda s, r: s.fits(r["w1"]),
    "blocks_needed": lambda s, r: s.blocks_needed(r["w1"], 1),
    "grant": lambda s, r: s.grant(r["d1"]),
    "grant_decodes": lambda s, r: s.grant_decodes(),
    "grant_decodes of none": lambda s, r: s.grant_decodes([]),
    "preempt": lambda s, r: s.preempt(r["d1"]),
    "idle_until": lambda s, r: s.idle_until(1.0),
    "hold": lambda s, r: s.hold(),
}


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("used", [False, True])
def test_a_step_is_dead_after_schedule(member, used):
    """Also for what was read while it lived."""
    kept = []

    def keep(step):
        requests = named(step)
        kept.append((step, requests))
        if used:
            for name in ("running", "cache_changed", "waiting", "prefilling", "decoding"):
                getattr(step, name)
        serve(step)

    def reach_back(step):
        dead, requests = kept[0]
        MEMBERS[member](dead, requests)

    made = populated(keep, reach_back)
    made.step()
    with pytest.raises(PolicyError, match="policy Script.*schedule returned"):
        made.engine.step()
