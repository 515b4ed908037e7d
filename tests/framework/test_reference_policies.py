"""Every policy against a second one written from its docstring, on dense random traces, with knobs that bite.

The policy holds where it may and the reference is asked at every step, so a hold that lasts too long shows as well.
"""

from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from references import Reference, bearable
from scripted import MS, JumpingExecutor

from schedlab.framework.request import SLO
from schedlab.framework.testing.case import Guess
from schedlab.framework.testing.harness import Spec, run
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.edf import EDF
from schedlab.policies.fair import Fair
from schedlab.policies.fcfs import FCFS
from schedlab.policies.hrrn import HRRN
from schedlab.policies.multilevel_feedback import MultilevelFeedback
from schedlab.policies.orca import Orca
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.policies.priority import Priority
from schedlab.policies.sjf import SJF
from schedlab.policies.slo_aware import SLOAware
from schedlab.policies.static_batching import StaticBatching
from schedlab.policies.victims import least_computed, most_computed, newest, oldest


@dataclass(frozen=True)
class Uneven:
    """An estimator in which every argument counts."""

    def step_s(self, prefill_tokens=0, prefill_start=0, decodes=0, decode_context=0):
        reading = 3e-6 * prefill_tokens * (prefill_start + prefill_tokens) + 2e-6 * decode_context
        return 1e-3 + 2e-5 * (prefill_tokens + decodes) + reading

    def copy_s(self, tokens):
        return 8e-5 * tokens


def objective(dice):
    limits = [dice.choice([None, None, ms / 1000]) for ms in (dice.randint(1, 60), dice.randint(11, 25) / 10, 40)]
    return dice.choice([None, SLO(f"{limits}", *limits), SLO(f"{limits}", *limits)])


def crowd(dice):
    """Requests that queue, share prefixes, come back to sessions and outgrow the pool."""
    trace, now, prompts, outputs = [], 0, dice.choice([12, 50]), dice.choice([12, 40])
    for i in range(dice.randint(4, 16)):
        now += dice.choice([0, 0, 0, 1, 2, 5, 20]) * MS
        prompt, shared = dice.randint(1, prompts), dice.randint(0, 8)
        ids = tuple(k if k < shared else 100 * (i % 3 + 1) + k for k in range(-(-prompt // 4)))
        deadline = dice.choice([None, now + dice.randint(1, 80) * MS])
        more = {"priority": dice.randint(0, 2), "client": dice.choice("abc"), "slo": objective(dice)}
        abort = now + dice.randint(0, 60) * MS if dice.random() < 0.1 else None
        more |= {"live": dice.random() < 0.3, "deadline_ns": deadline, "abort_ns": abort}
        trace.append(Spec(f"r{i}", now, prompt, dice.randint(1, outputs), ids=ids, id_width=4, **more))
    return trace


def limits(dice, largest):
    """An engine whose pool holds little more than the largest request, in tokens."""
    size = dice.choice([1, 3, 4, 4, 8])
    return {
        "block_size": size,
        "num_blocks": -(-(largest + dice.randint(0, 30)) // size),
        "max_num_seqs": dice.choice([1, 2, 4, 6, 8, 8]),
        "max_num_batched_tokens": dice.choice([8, 16, 32, 64]),
        "swap_space_gib": dice.choice([0, 40, 400]) * 8 / (1 << 30),
        "enable_prefix_caching": dice.random() < 0.8,
        "watermark": dice.choice([0.0, 0.0, 0.1, 0.3]),
    }


def preempting(dice):
    return {"preempt_mode": dice.choice(["recompute", "swap", "auto"]), "estimator": Uneven()}


def choosing(dice):
    return {"victim": dice.choice([newest, newest, oldest, most_computed, least_computed]), **preempting(dice)}


def chunk(dice):
    return dice.choice([1, 3, 8, 12, 20, 200])


def slo_aware(dice):
    knobs = choosing(dice)
    knobs |= {"min_chunk": dice.choice([1, 2, 5]), "patience_s": dice.choice([0.005, 0.02, 9.0])}
    return SLOAware(**{**knobs, "chunk_size": chunk(dice)})


def multilevel_feedback(dice):
    knobs = {"quantum": dice.choice([1, 2, 4]), "num_levels": dice.randint(1, 4), "chunk_size": chunk(dice)}
    knobs |= {"prompt_weight": dice.choice([0.0, 0.0625, 0.25]), "promote_after_s": dice.choice([0.01, 0.05, 9.0])}
    return MultilevelFeedback(**knobs, **preempting(dice))


MAKERS = {
    "fcfs": lambda dice: FCFS(**choosing(dice)),
    "chunked_prefill": lambda dice: ChunkedPrefill(chunk(dice), **choosing(dice)),
    "decode_priority": lambda dice: DecodePriority(
        chunk(dice), dice.randint(1, 3), dice.randint(0, 6), **choosing(dice)
    ),
    "prefix_reuse": lambda dice: PrefixReuse(chunk(dice), dice.choice([1.0, 200.0, 4096.0]), **choosing(dice)),
    "sjf": lambda dice: SJF(chunk(dice), dice.choice([0.0, 1.0, 2.5]), dice.choice([1.0, 256.0]), **choosing(dice)),
    "hrrn": lambda dice: HRRN(chunk(dice), dice.choice([0.0, 1.0, 2.5]), **choosing(dice)),
    "fair": lambda dice: Fair(chunk(dice), dice.choice([0.5, 1.0]), dice.choice([1.0, 2.0]), **choosing(dice)),
    "priority": lambda dice: Priority(chunk(dice), dice.random() < 0.7, **preempting(dice)),
    "edf": lambda dice: EDF(chunk(dice), dice.choice([0.0, 0.02, 60.0]), **preempting(dice)),
    "slo_aware": slo_aware,
    "multilevel_feedback": multilevel_feedback,
    "static_batching": lambda dice: StaticBatching(dice.randint(1, 5), **preempting(dice)),
    "orca": lambda dice: Orca(**preempting(dice)),
}


@given(st.integers(0, 2**32))
def test_slo_aware_finds_the_largest_bearable_step(seed):
    """Several prompts and decodes at once, each somewhere else: the first prompt is the one that goes on."""
    dice = Random(seed)

    def some():
        computed = [dice.randint(0, 60) for _ in range(dice.randint(0, 4))]
        return [SimpleNamespace(num_computed_tokens=n, num_tokens=n + 1, slo=objective(dice)) for n in computed]

    knobs = SLOAware(Uneven(), chunk_size=dice.choice([1, 3, 12, 90]), min_chunk=dice.choice([1, 2, 5]))
    step = SimpleNamespace(waiting=[1], prefilling=some(), decoding=some(), token_budget=dice.choice([8, 16, 64]))
    assert knobs._chunk(step) == bearable(step, knobs)


SEEDS = settings.default.max_examples * 5 // 8


def decided(outcome):
    """Rows of decisions: victims with modes, grants, decodes, times in a row."""
    columns = [outcome.tables.decisions[key] for key in ("preempted", "grants", "decodes", "repeat")]
    return [repr(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("name", MAKERS)
def test_a_policy_decides_as_its_docstring_says(name):
    for seed in range(SEEDS):
        dice = Random(f"{name} {seed}")
        trace = crowd(dice)
        keys, knobs = limits(dice, max(spec.prompt + spec.output for spec in trace)), MAKERS[name](dice)
        more = {"executor": JumpingExecutor(300), "predictor": Guess(), "audited": False, **keys}
        theirs = run(Reference(knobs), trace, honour_holds=False, **more)
        ours = run(knobs, trace, **more)
        if ours.digest != theirs.digest:
            assert decided(ours) == decided(theirs), f"seed {seed}: {knobs}, {keys}"
            raise AssertionError(f"seed {seed}: equal rows, unequal digests")
        reasons = {why for row in ours.tables.decisions["refusals"] for _, why in row}
        assert reasons <= {"memory"}, f"seed {seed}: asked for what there was no budget or slot for"
