"""CPU time of scheduling a step, of vLLM's own scheduler and under policies: `python tests/vllm/scheduler_cpu.py`.

In the environment that has vLLM. 256 requests decode; nobody or 2,000 wait behind them. The schedulers take turns,
A B A B, so that what else the machine does is the same for all; each figure is the median of its steps.
"""

import os
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import rig
from vllm.v1.core.sched.scheduler import Scheduler

from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fair import Fair
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse

DECODES, TURNS, STEPS = 256, 8, 10
POLICIES = {
    "fcfs": FCFS,
    "chunked_prefill": lambda: ChunkedPrefill(chunk_size=512),
    "decode_priority": DecodePriority,
    "prefix_reuse": PrefixReuse,
    "fair": lambda: Fair(chunk_size=512),
}
"""Their steps have room for more tokens than all that decode: with less, the last prompts begin when others end."""
LIMITS = {"blocks": 4000, "seqs": DECODES, "budget": 2048}
AT_MOST = {0: 1.3, 2000: 1.4}
"""By how many wait: how many times vLLM's own time is expected at most, under fcfs."""


class Timed(rig.Run):
    """A run that keeps the microseconds of each step's `schedule` and `update_from_output`."""

    def timed(self):
        """One step; its two times."""
        began = time.thread_time_ns()
        out = self.scheduler.schedule()
        scheduled = time.thread_time_ns()
        answer = self.worker.execute(out)
        assert len(out.num_scheduled_tokens) == DECODES
        executed = time.thread_time_ns()
        self.scheduler.update_from_output(out, answer)
        return (scheduled - began) / 1000, (time.thread_time_ns() - executed) / 1000


def decoding(scheduler, waiting):
    """A run in which DECODES requests decode, and `waiting` more wait."""
    run = Timed(scheduler)
    load = rig.load_of(0, DECODES + waiting, longest=160, outputs=2)
    for asked in load:
        asked.tokens = 500
    run.add(*load)
    while sum(len(tokens) > 0 for tokens in run.streams.values()) < DECODES:
        run.step()
    assert not run.reasons, "nobody has ended yet"
    return run


def measured(waiting):
    """By scheduler: medians of the microseconds that `schedule` and `update_from_output` took."""
    makers = {"vllm": lambda: Scheduler(**rig.arguments(**LIMITS))}
    makers |= {name: lambda make=make: rig.scheduler_of(make(), **LIMITS) for name, make in POLICIES.items()}
    runs = {name: decoding(make(), waiting) for name, make in makers.items()}
    times = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            times[name] += [run.timed() for _ in range(STEPS)]
    return {name: tuple(median(column) for column in zip(*pairs, strict=True)) for name, pairs in times.items()}


def main():
    for waiting, limit in AT_MOST.items():
        found = measured(waiting)
        own = found["vllm"]
        print(f"{DECODES} decode, {waiting:,} wait; CPU microseconds a step (of vLLM's own)")
        for name, (schedule, update) in found.items():
            print(f"  {name:16} schedule {schedule:7,.0f} ({schedule / own[0]:.2f})  update {update:7,.0f} "
                  f"({update / own[1]:.2f})")  # fmt: skip
        ratio = found["fcfs"][0] / own[0]
        verdict = "met" if ratio <= limit else "NOT met"
        print(f"  fcfs: {ratio:.2f} times vLLM's own, expected at most {limit}: {verdict}")


if __name__ == "__main__":
    main()
