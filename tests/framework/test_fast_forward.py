"""A jump is what stepping would have done, to the bit; and a jump that ignores any one of its stops is found out."""

import math
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from four import ALL
from hypothesis import given
from hypothesis import strategies as st
from scripted import HOST_BLOCK_GIB, MS, PART, JumpingExecutor, Script, grants, interpreted_only, lab

from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.decode_set import DecodeSet
from schedlab.framework.engine import Engine
from schedlab.framework.errors import PolicyStalled
from schedlab.framework.jump import Jump
from schedlab.framework.policy import Policy, Progressed
from schedlab.framework.prefix_cache import PrefixCache
from schedlab.framework.results.record import Recorder
from schedlab.framework.testing.harness import Spec
from schedlab.policies.common import admit, continue_prefills, decode_all


@dataclass
class Windows(Policy):
    """Admits only in the first step at or after each multiple of `period_ns`, and otherwise lets the decodes stand."""

    period_ns: int = 7 * MS
    preempt_mode: str = "swap"
    _window: int = field(default=-1, init=False)

    def schedule(self, step):
        undisturbed = decode_all(step, self.preempt_mode)
        chunks = continue_prefills(step, step.token_budget, self.preempt_mode)
        window = round(step.now * 1e9) // self.period_ns
        if undisturbed and (window > self._window or not step.running):
            self._window = window
            chunks += admit(step, step.waiting, step.token_budget)
        if undisturbed and not chunks and step.decoding:
            step.hold(until=(window + 1) * self.period_ns / 1e9)


def roofline():
    """The real cost model, on a machine so slow that memory overtakes overhead within a decode's life."""
    shape = SimpleNamespace(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4, vocab_size=100,
        intermediate_size=16, tie_word_embeddings=True, qkv_bias=False, qk_norm=False, sliding_window=None,
    )  # fmt: skip
    machine = Hardware(
        name="slow", peak_tflops={"bf16": 1e-3, "fp32": 1e-3}, memory_gb=1, memory_gb_s=0.03, host_link_gb_s=0.01,
        interconnect_gb_s=0, linear_efficiency=0.5, attention_efficiency=0.4, memory_efficiency=0.8,
        link_efficiency=0.8, kernel_us=5, step_us=600, request_us=20, sequence_us=0, scheduler_us=10,
        scheduler_request_us=1, collective_us=0, copy_us=15,
    )  # fmt: skip
    return CostExecutor(shape, machine)


POLICIES = {**ALL, "windows": Windows, "windows/recompute": lambda: Windows(9 * MS, "recompute")}
EXECUTORS = {
    "roofline": roofline,
    "context": lambda: JumpingExecutor(slope=9173),
    "whole milliseconds": lambda: JumpingExecutor(token_ns=0),  # so that events fall on boundaries
}


def busy(seed):
    """A trace that queues, shares prefixes, aborts and outgrows its pool, and the engine's limits for it."""
    dice = random.Random(seed)
    trace, now = [], 0
    for i in range(dice.randint(5, 14)):
        now += dice.choice([0, 1, 3, 3, 11, 40]) * MS
        prompt = dice.choice([dice.randint(1, 8), dice.randint(9, 40), dice.randint(41, 60)])
        shared, branch = dice.randint(0, 15), dice.randint(1, 2)
        ids = tuple(k if k < shared else 100 * branch + k for k in range(-(-prompt // 4)))
        abort_ns = now + dice.randint(1, 60) * MS if dice.random() < 0.2 else None
        trace.append(Spec(f"r{i}", now, prompt, dice.randint(1, 76 - prompt), ids=ids, id_width=4, abort_ns=abort_ns))
    keys = {
        "block_size": 4,
        "num_blocks": dice.randint(19, 30),
        "max_num_seqs": dice.randint(2, 6),
        "max_num_batched_tokens": dice.choice([8, 32]),
        "swap_space_gib": dice.choice([0, 6, 60]) * HOST_BLOCK_GIB,
        "audit_every": 50,
    }
    return trace, keys


STAMPS = (
    "request_id", "state", "reason", "first_scheduled_ns", "_first_token_ns", "emitted_ns", "finished_ns", "admission",
    "num_output_tokens", "num_preemptions", "cached_tokens", "resumed_tokens", "recomputed_tokens", "swaps",
)  # fmt: skip


def outcome(name, seed, executor, opens=None, **changes):
    """Everything of a run that must not depend on how its standing decisions are executed.

    `opens`: a window of 40 ms opens after this share of the time in which requests arrive.
    """
    trace, keys = busy(seed)
    if opens is not None:
        start_s = trace[-1].arrival_ns * opens / 1e9
        keys["window"] = {"start_s": start_s, "stop_s": max(start_s, trace[-1].arrival_ns / 1e9) + 0.04}
    made = lab(POLICIES[name](), trace, executor=EXECUTORS[executor](), **keys, **changes)
    tables = made.finish()
    stamps = [tuple(getattr(request, stamp) for stamp in STAMPS) for request in made.requests.values()]
    summary = {key: value for key, value in tables.summary.items() if not key.startswith("scheduler/")}
    return {"digest": tables.digest, "stamps": stamps, "summary": summary}


def assert_same(name, seed, executor, **keys):
    jumped = outcome(name, seed, executor, **keys)
    stepped = outcome(name, seed, executor, fast_forward=False, **keys)
    asked = outcome(name, seed, executor, honour_holds=False, **keys)
    for key in jumped:
        assert jumped[key] == stepped[key], f"{key} of a jump and of steps"
        assert jumped[key] == asked[key], f"{key} of a jump and of asking in every step"


@pytest.mark.parametrize("name", POLICIES)
@PART
@given(
    executor=st.sampled_from(list(EXECUTORS)),
    seed=st.integers(0, 2**32),
    steps=st.sampled_from([1, 1, 2, 5]),
    opens=st.sampled_from([None, 0.3, 1.0]),
)
def test_jumping_stepping_and_asking_give_the_same_run(name, executor, seed, steps, opens):
    assert_same(name, seed, executor, max_chained_steps=steps, opens=opens)


def test_the_real_cost_model_is_jumped_over_and_changes_its_bound():
    trace = [Spec("a", 0, 8, 80), Spec("b", 0, 8, 80)]
    made = lab(Windows(50 * MS), trace, executor=roofline(), num_blocks=60)
    tables = made.finish()
    assert tables.steps["repeat"].max() > 5
    assert set(tables.steps["bound"]) == {"overhead", "memory"}


# -- mutants: each stop ignored ---------------------------------------------------------------------------------------


def while_extending(patch, change):
    """Let `change(engine or jump)` hold while a jump is extended and while its latest end is found, and only then."""
    for owner, name in ((Engine, "_stop_ns"), (Jump, "_extend_by_steps"), (Jump, "_extend_by_chains")):
        patch.setattr(owner, name, changed(getattr(owner, name), change))


def changed(extend, change):
    def wrong(self, *arguments):
        with change(self):
            return extend(self, *arguments)

    return wrong


def replaced(owner, name, value):
    @contextmanager
    def change(where):
        if owner == "engine" and not isinstance(where, Engine):
            yield
            return
        target = where if owner == "engine" else owner
        before = getattr(target, name)
        setattr(target, name, value(before))
        try:
            yield
        finally:
            setattr(target, name, before)

    return change


class Endless(int):
    """Free blocks that always suffice, and count as those that there are."""

    def __ge__(self, need):
        return True

    def __lt__(self, need):
        return False

    def __sub__(self, need):
        return Endless(int(self) - need)


MUTANTS = {
    "arrival": replaced("engine", "_arrival_ns", lambda arrival: math.inf),
    "abort": replaced(Engine, "next_event_ns", lambda real: lambda self: self._arrival_ns),
    "arrival or abort at a boundary": replaced(Engine, "next_event_ns", lambda real: lambda self: real(self) + 1),
    "finish": replaced(DecodeSet, "next_finish", lambda real: lambda self: real(self) + 1),
    "until": replaced("engine", "standing_until", lambda until: math.inf),
    "until at a boundary": replaced("engine", "standing_until", lambda until: until + 1),
    "shortage": replaced(PrefixCache, "num_free", lambda real: property(lambda self: Endless(real.fget(self)))),
    "eviction of a counted block": replaced(
        PrefixCache, "would_evict_expected_hit", lambda real: lambda self, count: False
    ),
    "edge of the window": replaced(Recorder, "next_edge_ns", lambda real: lambda self, now: math.inf),
}


@interpreted_only
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_jump_that_ignores_a_stop_is_found_out(mutant, steps, monkeypatch):
    while_extending(monkeypatch, MUTANTS[mutant])
    with pytest.raises((AssertionError, PolicyStalled)):  # nothing fits any more who outgrew the length of its end
        the_runs_agree(steps)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_jump_that_ignores_none_passes(steps):
    the_runs_agree(steps)


def the_runs_agree(steps=1):
    """On a few traces that have every stop within a jump; that of an eviction decides about one trace in a hundred."""
    for seed in (116, 129, 0, 1, 2, 3, 4, 5):
        for executor in EXECUTORS:
            for name in ("prefix_reuse", "windows"):
                assert_same(name, seed, executor, max_chained_steps=steps, opens=0.3)


def test_jumps_do_happen_and_save_the_policy_s_calls():
    calls = []

    class Counting(Windows):
        def schedule(self, step):
            calls.append(step.now)
            super().schedule(step)

    counts = []
    for changes in ({}, {"fast_forward": False}, {"honour_holds": False}):
        calls.clear()
        trace, keys = busy(3)
        made = lab(Counting(), trace, executor=JumpingExecutor(slope=9173), **keys, **changes)
        made.finish()
        counts.append((len(calls), len(made.engine.executor.batches)))
    jumped, stepped, asked = counts
    assert jumped[0] == stepped[0] < asked[0] / 2
    assert jumped[1] < stepped[1] == asked[1], "a jump executes no batch"


class Accounting(Windows):
    """Counts each request's tokens from the events it hears."""

    def __init__(self):
        super().__init__(preempt_mode="recompute")
        self.tokens, self.log = {}, []

    def schedule(self, step):
        self.log.append((step.now, sorted(self.tokens.items())))
        super().schedule(step)

    def observe(self, event):
        if isinstance(event, Progressed):
            for request, tokens in [*event.prefills, *[(request, event.steps) for request in event.decodes]]:
                self.tokens[request.request_id] = self.tokens.get(request.request_id, 0) + tokens


@given(seed=st.integers(0, 2**32))
def test_what_a_policy_counts_from_events_is_the_same_whenever_it_is_asked(seed):
    logs = []
    for changes in ({}, {"fast_forward": False}, {"honour_holds": False}):
        trace, keys = busy(seed)
        policy = Accounting()
        lab(policy, trace, executor=JumpingExecutor(slope=9173), **keys, **changes).finish()
        logs.append([*policy.log, policy.tokens])
    jumped, stepped, asked = logs
    assert jumped == stepped
    assert all(entry in asked for entry in jumped)


class Remembering(Windows):
    """Keeps how far each request was when it last heard of its progress; looks at that when it decides."""

    def __init__(self):
        super().__init__(preempt_mode="recompute")
        self.outputs, self.log = {}, []

    def schedule(self, step):
        known = [(r.request_id, self.outputs.get(r.request_id, 0), r.num_output_tokens) for r in step.running]
        self.log.append((step.now, known))
        super().schedule(step)

    def observe(self, event):
        if isinstance(event, Progressed):
            for request in [*[request for request, _ in event.prefills], *event.decodes]:
                self.outputs[request.request_id] = request.num_output_tokens


def test_progress_is_told_when_it_has_been_made_by_a_step_as_by_a_jump():
    logs = []
    for changes in ({}, {"fast_forward": False}):
        policy = Remembering()
        lab(policy, [Spec("a", 0, 8, 20), Spec("b", 0, 8, 30)], executor=JumpingExecutor(), **changes).finish()
        logs.append(policy.log)
    for now, known in logs[0] + logs[1]:
        assert all(heard == emitted for _, heard, emitted in known), f"at {now} s: {known}"
    assert logs[0] == logs[1]


# -- what else a jump must not change ---------------------------------------------------------------------------------


def two_ways(trace, executor=None, moves=None, **keys):
    """Tables of a jumped and of a stepped run of two decodes that stand."""

    def stand(step):
        step.grant_decodes()
        step.hold()

    tables = []
    for fast in (True, False):
        policy = Script(*(moves or [grants(**{spec.name: None for spec in trace})]), then=stand)
        device = executor() if executor else JumpingExecutor(slope=9173)
        made = lab(policy, trace, executor=device, fast_forward=fast, **keys)
        tables.append(made.finish())
    return tables


PAIR = [Spec("a", 0, 8, 20), Spec("b", 0, 8, 30)]


def test_the_decision_rows_are_those_of_stepping():
    """Also where the step that decided to hold was refused something first."""

    def refused(step):
        assert not step.grant(step.decoding[0], 0)
        step.grant_decodes()
        step.hold()

    jumped, stepped = two_ways(PAIR, moves=[grants(a=None, b=None), refused])
    for column in stepped.decisions:
        assert list(map(str, jumped.decisions[column])) == list(map(str, stepped.decisions[column])), column


def test_the_step_rows_sum_up_to_those_of_stepping():
    jumped, stepped = two_ways(PAIR)
    assert jumped.steps["repeat"].sum() == len(stepped.steps["repeat"])
    assert jumped.steps["duration_ns"].sum() == stepped.steps["duration_ns"].sum()
    firsts = {int(row): i for i, row in enumerate(stepped.steps["index"])}
    for i, index in enumerate(jumped.steps["index"]):
        for column in ("now_ns", "context_tokens", "decode_tokens", "running", "free_blocks", "cached_blocks"):
            assert jumped.steps[column][i] == stepped.steps[column][firsts[int(index)]], column


@pytest.mark.parametrize("turn", [0, 25, 37, 60, 1 << 40])
def test_the_shares_of_what_bounds_a_step_are_those_of_stepping(turn):
    """A decode step is bound by memory from `turn` tokens of context on, which may be in the middle of a jump."""
    jumped, stepped = two_ways(PAIR, executor=lambda: JumpingExecutor(slope=9173, turn=turn))
    for bound in ("compute", "memory", "overhead"):
        assert jumped.summary[f"bound/{bound}"] == stepped.summary[f"bound/{bound}"]


@pytest.mark.parametrize("start_ms, stop_ms", [(10, None), (None, 10), (5, 20), (11.5, 11.6)])
def test_a_window_that_opens_within_a_jump_sees_what_it_sees_of_steps(start_ms, stop_ms):
    """Steps that begin outside of it and gaps that end outside of it are left out. A third request comes within it, to
    be rejected."""
    window = {"start_s": start_ms and start_ms / 1000, "stop_s": stop_ms and stop_ms / 1000}
    late = Spec("late", round((start_ms or 0) * MS), 8, 1 << 20)
    jumped, stepped = two_ways([*PAIR, late], moves=[grants(a=None, b=None)], window=window)
    for key, value in stepped.summary.items():
        if not key.startswith("scheduler/"):
            assert jumped.summary[key] == value, key
