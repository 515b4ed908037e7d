"""What policies share, on its own: queues against sorting, who goes first when overdue, making room, and holding."""

import itertools
from collections import Counter
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

import pytest
from four import ESTIMATOR, EVERY
from hypothesis import example, given
from hypothesis import strategies as st
from scripted import MS, JumpingExecutor, Script, checked, grants, lab, named, populated

from schedlab.framework.cost.estimator import LinearEstimator
from schedlab.framework.testing.harness import Spec, run
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.common import (
    check_chunk,
    chunked_step,
    continue_prefills,
    decode_all,
    decode_with_spare,
    never_short,
)
from schedlab.policies.edf import EDF
from schedlab.policies.fair import Account, Fair
from schedlab.policies.fcfs import FCFS
from schedlab.policies.preemption import cheaper
from schedlab.policies.ranking import RankedQueue, overdue_first
from schedlab.policies.sjf import work_left

# -- orders -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Waiter:
    number: int
    rank: int = 0
    state: str = "waiting"


class Crowd:
    """Requests that come, are ranked anew, run, come back and end, and a queue that is told of each change once."""

    def __init__(self, dice):
        self.dice, self.numbers = dice, itertools.count()
        self.there, self.changed = [], []
        self.queue = RankedQueue(lambda step, request: request.rank)

    def waiting(self):
        return [request for request in self.there if request.state == "waiting"]

    def move(self):
        for _ in range(self.dice.randint(0, 4)):
            self.there.append(Waiter(next(self.numbers), self.dice.randint(0, 5)))
            self.changed.append(self.there[-1])
        for request in self.there:
            if request.state == "running" and self.dice.random() < 0.3:
                request.state = "waiting"
                self.changed.append(request)
            if request.state == "waiting" and self.dice.random() < 0.2:
                request.rank = self.dice.randint(0, 5)
                self.changed.append(request)
            if self.dice.random() < 0.1:
                request.state = "finished"
        self.there = [request for request in self.there if request.state != "finished"]

    def walk(self):
        """Take some of the best, all of which run then; they must be those that sorting finds."""
        changed = [r for r in sorted(dict.fromkeys(self.changed), key=lambda r: r.number) if r.state == "waiting"]
        self.changed = []
        expected = sorted(self.waiting(), key=lambda request: (request.rank, request.number))
        count = self.dice.randint(0, len(expected))
        found = list(itertools.islice(self.queue.best_first(SimpleNamespace(cache_changed=changed)), count))
        assert found == expected[:count]
        assert [self.queue.rank_of(request) for request in found] == [request.rank for request in found]
        for request in found[: self.dice.randint(0, 2)]:
            request.state = "running"


@given(st.integers(0, 2**32))
def test_a_ranked_queue_walks_like_a_sort(seed):
    crowd = Crowd(Random(seed))
    for _ in range(30):
        crowd.move()
        crowd.walk()


def told(queue, *changed):
    """The whole walk after these requests have changed."""
    return list(queue.best_first(SimpleNamespace(cache_changed=changed)))


def test_a_ranked_queue_forgets_who_has_ended_and_nobody_else():
    """Two thousand live at once, which it bears, and end; then ten thousand pass through, five at a time.

    It keeps few of them, and equals in the order of their arrival, whoever ran or was ranked anew in between.
    """
    queue, there = RankedQueue(lambda step, request: 0), [Waiter(i) for i in range(2000)]
    told(queue, *there)
    there[7].state = "running"
    assert told(queue, there[5]) == there[:7] + there[8:]
    there[7].state = "waiting"
    assert told(queue, there[7], there[2]) == there
    for request in there:
        request.state = "finished"
    there = []
    for i in range(2000, 12_000):
        there.append(Waiter(i))
        assert told(queue, there[-1]) == there
        if len(there) == 5:
            there.pop(0).state = "finished"
    assert len(queue._places) <= 1100


def test_a_ranked_queue_with_a_crowd_of_the_living_is_not_searched_for_the_dead_in_every_step():
    """Three thousand wait: each arrival must not count them all again."""
    queue = RankedQueue(lambda step, request: 0)
    looks = Counter()

    class Watched(Waiter):
        def __getattribute__(self, name):
            looks[name] += 1
            return super().__getattribute__(name)

    there = [Watched(i) for i in range(3000)]
    queue.best_first(SimpleNamespace(cache_changed=there))
    looks.clear()
    for i in range(100):
        queue.best_first(SimpleNamespace(cache_changed=[Waiter(3000 + i)]))
    assert looks["state"] <= 2 * len(there)


waits = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=8)


@given(waits, st.integers(0, 4))
def test_the_overdue_go_first_and_nobody_is_lost(arrivals_and_ranks, patience):
    """Who became visible late stands behind others that arrived after it, and is nevertheless passed over by nobody."""
    waiting = [SimpleNamespace(arrival_s=float(at), rank=rank) for at, rank in arrivals_and_ranks]
    waiting = [SimpleNamespace(**vars(w), number=i) for i, w in enumerate(waiting)]
    hashable = [Overdue(w.number, w.arrival_s, w.rank) for w in waiting]
    step = SimpleNamespace(now=6.0, waiting=hashable)
    order = sorted(hashable, key=lambda request: (request.rank, request.number))
    found = list(overdue_first(step, order, float(patience)))
    ahead = list(itertools.takewhile(lambda request: 6.0 - request.arrival_s >= patience, hashable))
    assert found == ahead + [request for request in order if request not in ahead]


@dataclass(frozen=True)
class Overdue:
    number: int
    arrival_s: float
    rank: int


who_waits = st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 4)), max_size=8)


@given(who_waits, st.lists(st.integers(0, 8), min_size=3, max_size=3), st.sampled_from([0.5, 1.0]))
def test_fair_takes_turns_by_what_each_client_would_have_had(waiting, lifts, weight):
    """Counters that differ by halves; a resumed request is charged nothing, any other its uncached prompt."""
    policy = Fair(input_weight=weight)
    policy._accounts = {client: Account(lift=lift / 2) for client, lift in zip("abc", lifts, strict=True)}
    there = [SimpleNamespace(client=c, num_preemptions=int(again), num_tokens=n) for c, again, n in waiting]
    found = list(policy._least_served_first(SimpleNamespace(waiting=there, cached_tokens=lambda request: 0)))
    counters = {client: lift / 2 for client, lift in zip("abc", lifts, strict=True)}
    places = list(dict.fromkeys(request.client for request in there))
    taken = set()
    for request in found:
        left = [other for other in there if id(other) not in taken]
        client = min({other.client for other in left}, key=lambda c: (counters[c], places.index(c)))
        assert request is next(other for other in left if other.client == client)
        counters[client] += 0 if request.num_preemptions else weight * request.num_tokens
        taken.add(id(request))
    assert len(found) == len(there)


def test_without_a_prediction_an_answer_counts_as_max_tokens():
    it = Spec("it", 0, 10, 7, live=True).request()
    step = SimpleNamespace(cached_tokens=lambda request: 4)
    assert work_left(step, it) == 6 + 7
    it._predicted, it._base_tokens = 3, 12
    assert work_left(step, it, 2.0) == 8 + 2 * 1
    it._base_tokens = 15
    assert work_left(step, it) == 11, "more than predicted is no negative work"


def test_a_step_computes_at_least_a_token():
    check_chunk(1)
    with pytest.raises(ValueError, match="found 0"):
        check_chunk(0)


# -- making room ------------------------------------------------------------------------------------------------------


def test_who_lacks_budget_is_not_thrown_out_for_it():
    """p1's chunk leaves a budget of one for two decodes."""

    def move(step):
        assert step.grant(named(step)["p1"], 5)
        assert not decode_all(step), "d2 got none"
        assert [r.request_id for r in step.decoding if r.state == "running"] == ["d1", "d2"]

    checked(populated_with_six(move))


def test_nothing_is_asked_for_when_the_room_is_used_up():
    """p1 needs all 8 tokens; p2, a prompt like it, is not even refused any."""

    def move(step):
        assert continue_prefills(step, 8) == 8
        assert not step.fits(named(step)["p1"]) and step.fits(named(step)["p2"]) == 8

    made = populated(move)
    made.step()
    assert not any(len(row) for row in made.tables().decisions["refusals"])


@pytest.mark.parametrize("chunk_size, asked", [(9, []), (11, ["asked"])])
def test_an_order_is_asked_for_only_if_somebody_can_be_admitted(chunk_size, asked):
    """Two decode, and the prompt in line needs eight tokens of the chunk: nothing or two are left."""
    calls = []

    def move(step):
        step.preempt(named(step)["p2"])
        chunked_step(step, lambda step: calls.append("asked") or [], chunk_size)

    made = populated(move)
    made.step()
    assert calls == asked


@pytest.mark.parametrize("gone, decoded", [(None, "d1"), ("d1", "d2")])
def test_a_limit_leaves_the_newest_decodes_out(gone, decoded):
    """d1 and d2 decode; the limit is one."""

    def move(step):
        r = named(step)
        if gone is not None:
            step.preempt(r[gone])
        assert not decode_all(step, limit=1)
        assert [name for name in ("d1", "d2") if name != gone and not step.fits(r[name])] == [decoded]

    checked(populated(move))


def populated_with_six(move):
    trace = [Spec(name, 0, 2, 8) for name in ("d1", "d2")] + [Spec("p1", 0, 12, 4)]
    made = lab(Script(grants(d1=None, d2=None), grants(p1=4), move), trace, max_num_batched_tokens=6)
    made.step(2)
    return made


def test_a_prompt_that_throws_somebody_out_lets_nobody_in_behind_it():
    """6 blocks of 4. p throws v out for its last chunk, and w, whose deadline is between theirs, waits for one step."""
    trace = [Spec("v", 0, 10, 12, deadline_ns=900 * MS), Spec("p", 3 * MS, 12, 6, deadline_ns=10 * MS)]
    trace += [Spec("w", 5 * MS, 4, 3, deadline_ns=500 * MS)]
    outcome = run(EDF(chunk_size=8), trace, num_blocks=6, executor=JumpingExecutor())
    rows = zip(outcome.tables.decisions["preempted"], outcome.tables.decisions["grants"], strict=True)
    thrown = [(preempted, [who for who, _ in granted]) for preempted, granted in rows if len(preempted)]
    assert [victims[0][0] for victims, _ in thrown] == ["v"] and thrown[0][1] == ["p"]


@pytest.mark.parametrize("copy, mode", [(0.5, "recompute"), (0.49, "swap"), (0.51, "recompute")])
def test_a_draw_between_copying_and_computing_is_computed(copy, mode):
    estimator = LinearEstimator(step=0.0, token=1.0, copied_token=copy)
    victim = SimpleNamespace(num_computed_tokens=64)
    assert cheaper(estimator)(victim) == mode


def test_an_estimator_that_is_never_asked_makes_no_difference():
    assert FCFS(preempt_mode="swap", estimator=ESTIMATOR) == FCFS(preempt_mode="swap")
    assert FCFS(preempt_mode="auto", estimator=ESTIMATOR).estimator is ESTIMATOR


# -- holding ----------------------------------------------------------------------------------------------------------


ASKED_OFTEN = ("sarathi", "fcfs/spare", "fastserve", "sglang_lpm")
"""Spare blocks may run out in a pool that could not hold every `max_tokens`; a quantum of time ends; the share of
outputs for which room is left falls, and who waits for that may come in.
"""


@pytest.mark.parametrize("name", [name for name in EVERY if not name.startswith(ASKED_OFTEN)])
def test_a_quiet_engine_is_left_alone(name):
    """Three answers of different lengths and nobody waits: a policy is asked when somebody ends and hardly else."""
    policy = EVERY[name]()
    calls = []
    schedule = policy.schedule
    policy.schedule = lambda step: (calls.append(step.now), schedule(step))[1]
    run(policy, [Spec(f"r{i}", 0, 3, 20 * (i + 1)) for i in range(3)], executor=JumpingExecutor())
    assert len(calls) <= 12


def test_decodes_that_fill_the_chunk_are_left_alone():
    """Four decode with a chunk of four: nobody is left out, so the decision stands although a fifth waits."""
    policy = ChunkedPrefill(chunk_size=4)
    calls = []
    schedule = policy.schedule
    policy.schedule = lambda step: (calls.append(step.now), schedule(step))[1]
    trace = [Spec(f"r{i}", 0, 1, 40) for i in range(4)] + [Spec("late", 10 * MS, 8, 1)]
    run(policy, trace, executor=JumpingExecutor(), num_blocks=200)
    assert len(calls) <= 12


# -- a spare block a decode -------------------------------------------------------------------------------------------


class Pool:
    """A step of decodes, each with blocks of its own, that notes what is done with them."""

    def __init__(self, owned, prompts, free, budget):
        self.running = [
            SimpleNamespace(number=i, owned=blocks, state="running", prompt=i in prompts)
            for i, blocks in enumerate(owned)
        ]
        self.decoding = [request for request in self.running if not request.prompt]
        self.free_blocks, self.token_budget, self.done = free, budget, []

    def preempt(self, request, mode):
        assert request.state == "running" and mode == "recompute"
        request.state = "preempted"
        self.free_blocks += request.owned
        self.done.append(("preempt", request.number))

    def grant(self, request):
        assert request.state == "running" and self.token_budget > 0
        self.token_budget -= 1
        takes = request.number % 2  # starts a block with this token
        self.done.append(("grant", request.number))
        if takes > self.free_blocks:
            return False
        self.free_blocks -= takes
        return True


def with_spare(pool, limit, aside):
    """The rule in its own words: as long as somebody else runs, a free block beyond those aside, or the newest goes."""
    disturbed = limit is not None and len(pool.decoding) > limit
    for request in pool.decoding if limit is None else pool.decoding[:limit]:
        if request.state == "preempted" or pool.token_budget == 0:
            continue
        while pool.free_blocks - aside(pool) < 1 and sum(r.state == "running" for r in pool.running) >= 2:
            disturbed = True
            last = [r for r in pool.running if r.state == "running"][-1]
            pool.preempt(last, "recompute")
            if last is request:
                break
        if request.state == "running" and not pool.grant(request):
            disturbed = True
    return not disturbed


def set_aside(pool):
    """One for each that still runs as a prompt."""
    return sum(request.prompt and request.state == "running" for request in pool.running)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sets(st.integers(0, 5)), st.integers(0, 4),
    st.integers(0, 6), st.none() | st.integers(1, 6), st.booleans(),
)  # fmt: skip
@example([0], set(), 0, 1, None, False)  # who runs alone needs no spare block
@example([0, 0], set(), 2, 2, 2, False)  # as many as the limit are not disturbed
def test_decodes_need_a_spare_block_each(owned, prompts, free, budget, limit, aside):
    ours, expected = (Pool(owned, prompts, free, budget) for _ in range(2))
    options = {"set_aside": set_aside} if aside else {}
    undisturbed = decode_with_spare(ours, limit=limit, **options)
    assert undisturbed == with_spare(expected, limit, set_aside if aside else lambda pool: 0)
    assert ours.done == expected.done


@pytest.mark.parametrize(("free", "stands"), [(9, False), (10, False), (11, True)])
def test_spare_blocks_may_be_short_in_the_worst_case(free, stands):
    """4 + 8 - 1 - 6 tokens are left to compute of each of two, which take a block a token here; one must be left."""
    request = SimpleNamespace(num_prompt_tokens=4, max_tokens=8, num_computed_tokens=6)
    step = SimpleNamespace(
        decoding=[request, request], free_blocks=free, blocks_needed=lambda request, tokens: tokens
    )  # fmt: skip
    assert never_short(step) == stands
