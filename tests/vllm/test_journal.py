"""What is recorded of a vLLM engine: the rows of any run."""

import pytest
import rig

from policies import EVERY
from schedlab.framework.vllm.own import OwnScheduler


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_vllms_own_scheduler_is_recorded_as_a_policy_is(is_async):
    load = rig.load_of(4, 32)
    run, tables = rig.recorded(OwnScheduler(), load, blocks=30, is_async=is_async)
    run.check(load)
    by_name = dict(zip(tables.requests["request_id"], tables.requests["output_tokens"].tolist(), strict=True))
    assert by_name == {asked.name: asked.tokens for asked in load}
    steps, decisions = tables.steps, tables.decisions
    assert steps["index"].tolist() == list(range(len(steps["index"])))
    granted = [sum(tokens for _, tokens in grants) for grants in decisions["grants"]]
    assert sum(granted) == steps["prefill_tokens"].sum()
    assert tables.requests["preemptions"].sum() > 0 and len(steps["now_ns"]) == sum(map(bool, run_outs(run)))
    assert (steps["now_ns"][1:] >= (steps["now_ns"] + steps["duration_ns"])[:-1]).all()


def run_outs(run):
    return [out.num_scheduled_tokens for out in run.outs]


def test_stamps_of_a_request_are_in_order():
    _, tables = rig.recorded(EVERY["decode_priority"](), rig.load_of(6, 24), blocks=40)
    rows = tables.requests
    for before, after in (
        ("arrival_s", "first_scheduled_s"), ("first_scheduled_s", "first_token_s"), ("first_token_s", "finished_s"),
    ):  # fmt: skip
        assert (rows[before] <= rows[after]).all()


@pytest.mark.parametrize("name", ["chunked_prefill", "prefix_reuse"])
def test_cached_blocks_that_nobody_owns_are_counted(name):
    """By formula in each step; here beside a look at every block."""
    load = rig.load_of(7, 32)
    for blocks in (30, 199):
        run = rig.Run(rig.scheduler_of(EVERY[name](), blocks=blocks))
        run.add(*load)
        books, pool = run.scheduler._books, run.scheduler.kv_cache_manager.block_pool
        while run.scheduler.has_unfinished_requests():
            run.step()
            looked_at = sum(block.ref_cnt == 0 and block.block_hash is not None for block in pool.blocks[1:])
            assert books.num_cached_blocks == looked_at
