"""Clocks alone and under an engine: what passes time, what does not, and that recorded time repeats a measured run."""

import time
from dataclasses import replace

import pytest
from four import ALL
from hypothesis import given
from hypothesis import strategies as st
from scripted import HOST_BLOCK_GIB, MS, PART, JumpingExecutor, Script, ScriptedExecutor, Told, grants, lab
from test_fast_forward import Windows

from schedlab.framework.clock import BusyClock, RecordedClock, VirtualClock, WallClock
from schedlab.framework.errors import ConfigError
from schedlab.framework.testing.chaos import Chaos
from schedlab.framework.testing.harness import Spec
from schedlab.framework.testing.strategies import limits, specs


def spin(cpu_ns):
    """Use the thread's CPU for at least so long."""
    start = time.thread_time_ns()
    while time.thread_time_ns() - start < cpu_ns:
        pass


# -- virtual ----------------------------------------------------------------------------------------------------------


def test_the_virtual_clock_moves_by_what_is_modelled_alone():
    clock = VirtualClock()
    clock.start()
    spin(MS)
    clock.stop(25)
    assert clock.now() == 25
    clock.idle_until(100)
    clock.idle_until(40)
    assert clock.now() == 100, "never backwards"


def test_durations_are_whole_nanoseconds_without_drift():
    """A million steps of a third of a millisecond, each rounded once."""
    clock = VirtualClock()
    for _ in range(1000):
        clock.stop(333_333)
    assert clock.now() == 333_333_000


# -- busy -------------------------------------------------------------------------------------------------------------


def test_the_busy_clock_counts_cpu_between_start_and_stop():
    clock = BusyClock()
    clock.start()
    spin(3 * MS)
    clock.stop(10**15)
    counted = clock.now()
    assert 3 * MS <= counted < 10**15, "what an executor says of its duration does not matter"
    spin(MS)
    assert clock.now() == counted, "not what happens between steps"


def test_the_busy_clock_does_not_count_waiting():
    clock = BusyClock()
    clock.start()
    time.sleep(0.05)
    clock.stop(0)
    assert 1 <= clock.now() < 25 * MS


def test_the_busy_clock_skips_idle_time():
    clock, began = BusyClock(), time.monotonic()
    clock.idle_until(3600 * 10**9)
    assert clock.now() == 3600 * 10**9 and time.monotonic() - began < 60
    clock.idle_until(5)
    assert clock.now() == 3600 * 10**9


# -- wall -------------------------------------------------------------------------------------------------------------


def test_the_wall_clock_sleeps_idle_time_and_ignores_models():
    clock = WallClock()
    wake = clock.now() + 5 * MS
    clock.idle_until(wake)
    after = clock.now()
    assert after >= wake
    clock.start()
    clock.stop(10**15)
    assert after <= clock.now() < 10**15
    clock.idle_until(after)  # the past: returns at once


def test_a_run_on_the_wall_clock_lasts_until_its_last_arrival():
    trace = [Spec("a", 0, 4, 3), Spec("b", 15 * MS, 4, 3)]
    made = lab(Script(), trace, clock=WallClock())
    made.finish()
    assert made["b"].first_scheduled_ns >= 15 * MS


# -- recorded ---------------------------------------------------------------------------------------------------------


def test_the_recorded_clock_gives_each_start_and_each_end_in_turn():
    clock = RecordedClock([5, 9, 30], [4, 10, 1])
    seen = []
    for _ in range(3):
        seen.append(clock.boundary())
        clock.stop(1000)
        seen.append(clock.now())
        clock.idle_until(25)
    assert seen == [5, 9, 9, 19, 30, 31]
    assert clock.boundary() == 31, "after the last start only idling passes time"
    clock.idle_until(40)
    assert clock.boundary() == 40


def test_recorded_time_that_runs_backwards_is_refused():
    clock = RecordedClock([5, 4], [0, 0])
    clock.boundary()
    with pytest.raises(ConfigError, match="from 5 to 4"):
        clock.boundary()


def measured_and_recorded(make, trace, *, clock, source=None, executor=None, **keys):
    """Tables of a run on `clock`, and of the same run on its logged boundaries."""

    def tables(clock):
        device = executor() if executor else None
        return lab(make(), trace, clock=clock, source=source and source(), executor=device, **keys).finish()

    measured = tables(clock())
    return measured, tables(RecordedClock(measured.steps["now_ns"].tolist(), measured.steps["duration_ns"].tolist()))


def fast(trace):
    """The trace at the pace of the stub on a real clock: its times divided by 20. Without aborts."""
    return [replace(spec, arrival_ns=spec.arrival_ns // 20, abort_ns=None) for spec in trace]


@pytest.mark.parametrize("name", [*ALL, "windows", "chaos"])
@PART
@given(trace=specs(max_requests=8, max_prompt=40, max_output=12), keys=limits(), seed=st.integers(0, 99))
def test_recorded_boundaries_repeat_the_decisions_of_a_measured_run(name, trace, keys, seed):
    make = {"windows": lambda: Windows(MS), "chaos": lambda: Chaos(seed)}.get(name) or ALL[name]
    measured, recorded = measured_and_recorded(make, fast(trace), clock=BusyClock, **keys)
    assert measured.digest == recorded.digest
    assert measured.steps["now_ns"].tolist() == recorded.steps["now_ns"].tolist()


@given(trace=specs(max_requests=8, max_prompt=40, max_output=12), keys=limits())
def test_recorded_boundaries_repeat_aborts(trace, keys):
    """Here the measured run is a modelled one, which is the same each time, and its end is no abort."""
    trace = [*trace, Spec("last", 400 * MS, 4, 4)]
    measured, recorded = measured_and_recorded(ALL["chunked_prefill"], trace, clock=VirtualClock, **keys)
    assert measured.digest == recorded.digest


def test_an_abort_at_the_end_of_a_measured_run_is_repeated():
    """It falls into the last step, after which there is no other whose boundary could be logged."""
    trace = [Spec("a", 0, 4, 5, abort_ns=2_500_000)]
    measured = lab(Script(), trace).finish()
    boundaries = measured.steps["now_ns"].tolist()
    assert boundaries == [0, 1_040_000, 2_050_000]
    durations = measured.steps["duration_ns"].tolist()
    recorded = lab(Script(), trace, clock=RecordedClock(boundaries, durations)).finish()
    assert recorded.summary["requests/aborted"] == 1
    assert recorded.digest == measured.digest


def test_recorded_boundaries_repeat_a_run_on_the_wall_clock():
    def swap_and_idle(step):
        step.preempt(step.decoding[0], "swap")
        step.idle_until(step.now + 0.002)

    trace = [Spec(f"r{i}", i * MS, 8, 6, abort_ns=9 * MS if i == 2 else None) for i in range(5)]
    measured, recorded = measured_and_recorded(
        lambda: Script(grants(r0=None), grants(r0=1), swap_and_idle, then=Windows(2 * MS).schedule),
        trace, clock=WallClock, executor=lambda: ScriptedExecutor(1), swap_space_gib=8 * HOST_BLOCK_GIB,
    )  # fmt: skip
    assert measured.digest == recorded.digest


@pytest.mark.parametrize("background", [150, 1])
def test_recorded_boundaries_repeat_a_closed_loop(background):
    """Each of three clients asks again 5 ms after its last answer, beside a long request or with pauses in between."""

    class Thinking(Told):
        def finished(self, request, now_ns):
            super().finished(request, now_ns + 5 * MS)

    def source():
        chains = [[Spec(f"{client}{i}", 0, 8, 2 + n).request() for i in range(6)] for n, client in enumerate("abc")]
        after = {a.request_id: b for chain in chains for a, b in zip(chain, chain[1:], strict=False)}
        return Thinking([Spec("background", 0, 8, background).request(), *[chain[0] for chain in chains]], after=after)

    measured, recorded = measured_and_recorded(Script, [], clock=VirtualClock, source=source, num_blocks=80)
    assert measured.summary["requests/finished"] == recorded.summary["requests/finished"] == 19
    assert measured.digest == recorded.digest


# -- standing decisions on clocks that measure ------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [VirtualClock, BusyClock])
def test_a_measured_run_logs_every_step_of_a_standing_decision(clock):
    def stand(step):
        step.grant_decodes()
        step.hold()

    made = lab(Script(grants(a=None), then=stand), [Spec("a", 0, 4, 20)], clock=clock(), executor=JumpingExecutor())
    tables = made.finish()
    repeats = tables.steps["repeat"].tolist()
    assert repeats == ([1, 19] if clock is VirtualClock else [1] * 20)
    assert tables.decisions["repeat"].tolist() == [1, 19], "decisions are run-length rows on every clock"
    assert tables.summary["steps"] == 20


def test_a_hold_s_time_is_that_of_the_clock():
    """On a real clock a hold of no time at all ends at the next boundary."""
    asked = []

    def stand(step):
        asked.append(step.now)
        step.grant_decodes()
        step.hold(until=step.now)

    lab(Script(grants(a=None), then=stand), [Spec("a", 0, 4, 9)], clock=BusyClock()).finish()
    assert len(asked) == 8 and asked == sorted(asked)
