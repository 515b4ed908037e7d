"""An engine that comes back at a horizon goes on as if it had not stopped, and sees what was put meanwhile."""

import math

import pytest
from four import ALL
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import MS, Script, Told, lab, serve

from schedlab.framework.errors import PolicyStalled
from schedlab.framework.policy import Policy
from schedlab.framework.testing.executors import JumpingExecutor, PacedExecutor
from schedlab.framework.testing.harness import Spec
from schedlab.policies.common import admit, continue_prefills, decode_all


class Gathering(Policy):
    """Idles 7 ms where nothing runs, so that requests come together, and counts how often it was asked."""

    def __init__(self):
        self.woke, self.asked = 0.0, 0

    def schedule(self, step):
        self.asked += 1
        if not step.running and step.now >= self.woke + 0.02:
            self.woke = step.now + 0.007
        if not step.running and len(step.waiting) < 3 and step.now + 1e-6 < self.woke:
            step.idle_until(self.woke)
        elif decode_all(step) and not continue_prefills(step, 16) and not admit(step, step.waiting, 16):
            step.hold()


def trace(gaps):
    arrival = 0
    for i, gap in enumerate(gaps):
        arrival += gap * MS
        yield Spec(
            f"r{i}", arrival, 3 + 5 * (i % 4), 2 + 9 * (i % 3), abort_ns=arrival + 60 * MS if i % 5 == 4 else None
        )


def alone(make, specs, **keys):
    made = lab(make(), specs, **keys)
    return made, made.finish()


def led(make, specs, every_ns, late, **keys):
    """The same, called back every `every_ns`; with `late`, requests are put into the source as their time comes."""
    source = Told([] if late else [spec.request() for spec in specs])
    made = lab(make(), (), source=source, **keys)
    coming, engine, horizon = [spec.request() for spec in specs] if late else [], made.engine, 0
    while coming or engine.num_unfinished or source.peek() is not None:
        horizon = min(horizon + every_ns, coming[0].visible_ns) if coming else horizon + every_ns
        while engine.now_ns < horizon and engine.step(horizon):
            pass
        while coming and coming[0].visible_ns <= horizon:
            source.add(coming.pop(0))
    return made, made.finish()


def same(ours, theirs):
    (made, tables), (plain, expected) = ours, theirs
    assert tables.digest == expected.digest
    assert tables.requests.keys() == expected.requests.keys()
    for name, column in expected.requests.items():
        assert list(map(str, tables.requests[name])) == list(map(str, column)), name
    assert tables.decisions["now_ns"].tolist() == expected.decisions["now_ns"].tolist()
    if isinstance(plain.policy, Gathering):
        assert made.policy.asked == plain.policy.asked


@pytest.mark.parametrize("late", [True, False])
@settings(max_examples=15)
@given(
    gaps=st.lists(st.integers(0, 45), min_size=1, max_size=8),
    every=st.integers(1, 40),
    name=st.sampled_from(["gathering", *ALL]),
    jumps=st.booleans(),
)
def test_horizons_change_nothing(late, gaps, every, name, jumps):
    make = Gathering if name == "gathering" else ALL[name]
    specs = list(trace(gaps))
    keys = {"fast_forward": jumps, "executor": JumpingExecutor(slope=40)}
    same(led(make, specs, every * MS + 1, late, **keys), alone(make, specs, **keys))


def test_a_jump_and_idle_time_stop_at_the_horizon():
    made = lab(Script(serve, then=serve), [Spec("a", 5 * MS, 4, 100)], executor=PacedExecutor(MS, 0))
    assert made.engine.step(2 * MS) and made.engine.now_ns == 2 * MS
    assert made.engine.step(9 * MS) and made.engine.now_ns == 5 * MS


def test_what_idles_for_ever_is_a_stall_only_without_a_horizon():
    made = lab(Script(lambda step: step.idle_until()), [Spec("a", 0, 4, 2)])
    assert made.engine.step(3 * MS) and made.engine.step(5 * MS) and made.engine.now_ns == 5 * MS
    with pytest.raises(PolicyStalled, match=r"idle_until\(inf s\) at 0.005 s never wakes"):
        made.engine.step(math.inf)


def test_a_request_that_was_put_late_wakes_a_policy_that_idles():
    source = Told([Spec("a", 0, 4, 2).request()])
    seen = []

    def look(step):
        seen.append((step.now, len(step.waiting)))
        serve(step)

    made = lab(Script(lambda step: step.idle_until(0.05), look, then=serve), (), source=source)
    assert made.engine.step(10 * MS) and made.engine.now_ns == 10 * MS and not seen
    source.add(Spec("b", 12 * MS, 4, 2).request())
    made.engine.run()
    assert seen == [(0.012, 2)]
