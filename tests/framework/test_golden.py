"""Values that were worked out by hand: counts of phases, latencies, and the digest of a small run in any process."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from four import ALL, FOUR
from scripted import HOST_BLOCK_GIB, MS, Script, ScriptedExecutor, grants, lab, named

from schedlab.framework.request import SLO, EngineRequest
from schedlab.framework.testing.harness import Spec, run

# -- two phases, counted exactly --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("output", [1, 2, 7])
@pytest.mark.parametrize("prompt", [1, 4, 12, 30])
def test_n_tokens_are_one_prefill_and_n_minus_one_decodes(name, prompt, output):
    """All but the newest token have been computed, whether or not the prompt came in chunks."""
    executor = ScriptedExecutor(1)
    made = lab(FOUR[name](), [Spec("a", 0, prompt, output)], executor=executor, max_num_batched_tokens=16)
    tables = made.finish()
    chunks = [tokens for prefills, _ in executor.batches for _, _, tokens in prefills]
    decodes = sum("a" in decodes for _, decodes in executor.batches)
    assert sum(chunks) == prompt and decodes == output - 1
    if name in ("fcfs", "decode_priority"):
        assert chunks == [16] * (prompt // 16) + [prompt % 16] * (prompt % 16 > 0)
    request = made["a"]
    assert request.num_computed_tokens == prompt + output - 1 and request.num_tokens == prompt + output
    assert request._first_token_ns == len(chunks) * MS, "the last chunk emits the first token"
    assert request.finished_ns == (len(chunks) + output - 1) * MS
    assert tables.summary["steps"] == len(chunks) + output - 1


# -- latencies --------------------------------------------------------------------------------------------------------


def test_the_golden_latencies():
    """20 ms of preparation and queue, 80 of prefill, 5 of delivery, three gaps of 25."""
    it = EngineRequest(
        "it", 0, 10, Spec("it", 0, 10, 4).content(), recorded_output_tokens=4, visible_ns=8 * MS, delivery_ns=5 * MS,
        slo=SLO("tight", ttft_s=0.105, tpot_s=0.025, e2e_s=0.180),
    )  # fmt: skip
    before = Spec("before", 0, 4, 1).request()
    made = lab(Script(grants(before=None), grants(it=None)), [before, it], executor=ScriptedExecutor(20, 80, 25))
    tables = made.finish()
    row = {column: values[1] for column, values in tables.requests.items()}
    assert (row["request_id"], row["arrival_s"], row["visible_s"], row["first_scheduled_s"]) == ("it", 0, 0.008, 0.020)
    assert (row["first_token_s"], row["finished_s"], row["delivery_s"]) == (0.100, 0.175, 0.005)
    summary = tables.summary
    assert summary["ttft/max"] == 0.105
    assert summary["queue/max"] == 0.012, "visible to first grant"
    assert summary["e2e/max"] == 0.180
    assert summary["tpot/mean"] == summary["itl/mean"] == summary["itl/max"] == 0.025
    assert made["it"].num_output_tokens == 4 and sum(made.recorder._gaps.measured.values()) == 3
    assert summary["slo/attainment"] == 1.0, "limits are met to the nanosecond"
    assert tables.result["measurement"]["observed_at"] == "client"


def test_one_nanosecond_more_misses_the_objective():
    for late_ns, attainment in ((0, 1.0), (1, 0.0)):
        it = EngineRequest(
            "it", 0, 10, Spec("it", 0, 10, 4).content(), recorded_output_tokens=2, slo=SLO("tight", ttft_s=0.080)
        )
        made = lab(Script(), [it], executor=ScriptedExecutor(80 + late_ns / MS, 25))
        assert made.finish().summary["slo/attainment"] == attainment


def test_throughput_runs_from_the_first_arrival_to_the_last_token():
    """12 prompt and 5 output tokens between 1 ms and 6 ms."""
    trace = [Spec("a", MS, 8, 4), Spec("b", MS, 4, 1)]
    summary = lab(Script(), trace, executor=ScriptedExecutor(2, 1)).finish().summary
    assert summary["makespan_s"] == 0.005
    assert summary["throughput/output_tokens_per_s"] == 1000 and summary["throughput/requests_per_s"] == 400
    assert summary["throughput/total_tokens_per_s"] == pytest.approx(17 / 0.005)


def test_a_share_of_slots_and_tokens_is_weighted_by_time():
    """2 ms with one sequence of 8 tokens, then 6 ms with one decode; 4 slots; blocks: 2 of 8, then 3 of 8."""
    made = lab(Script(), [Spec("a", 0, 8, 2)], executor=ScriptedExecutor(2, 6), max_num_seqs=4, num_blocks=8)
    summary = made.finish().summary
    assert summary["batch/requests_mean"] == 1 and summary["batch/idle_slot_share"] == 0.75
    assert summary["batch/tokens_mean"] == (2 * 8 + 6 * 1) / 8
    assert summary["kv/utilization_mean"] == (2 * 2 / 8 + 6 * 3 / 8) / 8 and summary["kv/utilization_max"] == 3 / 8


# -- the digest -------------------------------------------------------------------------------------------------------

GOLDEN = "1391d940e3620856905acf94f0925f3e"


def small_run(executor=None, **keys):
    """Chunks, a partial decode, a preemption of each mode, a resume and a stretch of decodes."""

    def out(step):
        r = named(step)
        step.preempt(r["a"], "swap")
        step.preempt(r["b"])
        assert step.grant(r["c"], 3)

    def stand(step):
        if not (step.waiting or step.prefilling):
            step.grant_decodes()
            step.hold()
            return
        step.grant_decodes()
        for request in [*step.prefilling, *step.waiting]:
            assert step.grant(request)

    trace = [Spec("a", 0, 9, 12), Spec("b", 0, 6, 5), Spec("c", 0, 7, 6)]
    moves = [grants(a=4, b=None), grants(a=None), grants(b=1), out, lambda step: step.idle_until(step.now + 0.003)]
    keys = {"swap_space_gib": 8 * HOST_BLOCK_GIB, **keys}
    return lab(Script(*moves, then=stand), trace, executor=executor, **keys).finish().digest


def test_the_digest_of_a_small_run():
    """128-bit blake2b of its batches: (preempted, grants, decodes, place of the decodes among the grants, repeat)."""
    rows = [
        ([], [["a", 4], ["b", 6]], [], 0, 1),
        ([], [["a", 5]], [], 0, 1),
        ([], [], ["b"], 0, 1),
        ([["a", "swap"], ["b", "recompute"]], [["c", 3]], [], 0, 1),
        ([], [["c", 4], ["a", 1], ["b", 4]], [], 0, 1),
        ([], [], "all", 0, 10),
    ]
    written = hashlib.blake2b(digest_size=16)
    for preempted, granted, decodes, at, repeat in rows:
        batch = {"preempted": preempted, "grants": granted, "decodes": decodes, "decodes_at": at}
        written.update(f"{repeat} {json.dumps(batch, separators=(',', ':'))[1:-1]}\n".encode())
    assert small_run() == written.hexdigest() == GOLDEN


def test_the_digest_covers_no_times_and_no_hold():
    """Other durations and holds that are not honoured give the same batches."""
    assert small_run(ScriptedExecutor(3, 1, 4, 1, 5)) == GOLDEN
    assert small_run(honour_holds=False) == GOLDEN and small_run(fast_forward=False) == GOLDEN


def test_the_digest_covers_tokens_order_modes_and_decodes():
    trace = [Spec("a", 0, 9, 3), Spec("b", 0, 6, 3)]

    def digest(*moves):
        return lab(Script(*moves), trace, swap_space_gib=8 * HOST_BLOCK_GIB).finish().digest

    def out(name, mode):
        return lambda step: (step.preempt(named(step)[name], mode), step.grant_decodes())

    ways = [
        digest(grants(a=None, b=None)),
        digest(grants(b=None, a=None)),
        digest(grants(a=8, b=None)),
        digest(grants(a=None, b=None), grants(a=1)),
        digest(grants(a=None, b=None), grants(b=1)),
        digest(grants(a=None, b=None), out("a", "recompute")),
        digest(grants(a=None, b=None), out("a", "swap")),
        digest(grants(a=None, b=None), out("b", "swap")),
    ]
    assert len(set(ways)) == len(ways)


def four_digests():
    trace = [Spec(f"r{i}", i * MS, 12 + i, 9, ids=(1, 2, 10 + i), id_width=8, client=f"c{i % 3}") for i in range(9)]
    return [run(make(), trace, num_blocks=14, swap_space_gib=8 * HOST_BLOCK_GIB).digest for make in ALL.values()]


def test_digests_are_the_same_in_a_process_with_other_hashes():
    here = Path(__file__).parent
    code = "import test_golden; print(test_golden.small_run(), *test_golden.four_digests())"
    printed = []
    for seed in ("0", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(here)}
        answer = subprocess.run([sys.executable, "-c", code], env=environment, cwd=here, capture_output=True, text=True)
        assert answer.returncode == 0, answer.stderr
        printed.append(answer.stdout.split())
    assert printed[0] == printed[1] == [GOLDEN, *four_digests()]
