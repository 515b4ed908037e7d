"""What the policies that are named after other projects' schedulers do in situations worked out by hand."""

import pytest

from schedlab.framework.cost.estimator import LinearEstimator
from schedlab.framework.policy import Arrived
from schedlab.framework.testing.case import Guess
from schedlab.framework.testing.harness import Spec, run
from schedlab.policies.fair import Fair
from schedlab.policies.fastserve import FastServe
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.policies.sarathi import Sarathi
from schedlab.policies.sglang_lpm import SGLangLPM
from schedlab.policies.sjf import SJF
from schedlab.policies.srpt import SRPT

MS = 1_000_000
SLOW = LinearEstimator(step=0.001, token=0.001)
"""A prompt of n tokens takes n + 1 ms."""


def ends(policy, trace, **keys):
    """When each request ended, in milliseconds."""
    return {r.request_id: r.finished_ns / MS for r in run(policy, trace, **keys).requests}


class Levels(FastServe):
    """Notes the level and the service of each request whenever it is asked."""

    def schedule(self, step):
        super().schedule(step)
        for request, standing in self._standings.items():
            noted.append((request.request_id, standing.level, standing.used_ns))


noted = []


def test_fastserve_leaves_the_joined_level_after_a_full_quantum():
    """40 prompt tokens are estimated at 41 ms: the first quantum of at least that is 80 ms, on level 3."""
    noted.clear()
    run(Levels(SLOW), [Spec("long", 0, 40, 120)], honour_holds=False, num_blocks=60)
    levels = [level for _, level, _ in noted]
    assert levels[0] == 3 and levels == sorted(levels) and levels[-1] == 4
    at = levels.index(4)
    most = noted[at - 1][2]
    step_ns = noted[at - 1][2] - noted[at - 2][2]
    assert most <= 80 * MS < most + 2 * step_ns


def test_fastserve_lets_newcomers_pass_and_keeps_the_blocks_of_who_waits_for_them():
    trace = [Spec("long", 0, 40, 90), *[Spec(f"s{i}", 20 * MS, 8, 4) for i in range(2)]]
    policy = FastServe(SLOW, max_batch_size=1)
    outcome = run(policy, trace, num_blocks=60)
    order = sorted(outcome.requests, key=lambda request: request.finished_ns)
    assert [request.request_id for request in order] == ["s0", "s1", "long"]
    assert not any(request.num_preemptions for request in outcome.requests)


def test_fastserve_promotes_who_had_no_service():
    trace = [Spec("long", 0, 40, 30), *[Spec(f"s{i:03d}", 5 * i * MS, 8, 5) for i in range(80)]]
    soon = ends(FastServe(SLOW, max_batch_size=1, promote_after_s=0.02), trace, num_blocks=60)
    never = ends(FastServe(SLOW, max_batch_size=1, promote_after_s=100.0), trace, num_blocks=60)
    assert soon["long"] < never["long"]


def test_srpt_displaces_who_has_more_left():
    trace = [Spec("long", 0, 8, 60), Spec("short", 20 * MS, 8, 3)]
    by_length = ends(SRPT(), trace, max_num_seqs=1, predictor=Guess())
    in_order = ends(FCFS(), trace, max_num_seqs=1)
    assert by_length["short"] < 30 < 60 < in_order["short"]


def test_a_client_of_twice_the_share_is_served_twice():
    trace = [Spec(f"{client}{i}", 0, 8, 1, client=client) for i in range(12) for client in "ab"]
    outcome = run(Fair(chunk_size=8, client_weights={"a": 2.0}), trace, max_num_batched_tokens=8, num_blocks=40)
    order = [r.request_id[0] for r in sorted(outcome.requests, key=lambda r: r.finished_ns)]
    assert order[:9].count("a") == 6


def test_a_cost_takes_the_place_of_the_weights():
    policy = Fair(input_weight=5.0, cost=lambda prompt, output: prompt * prompt + output)
    trace = [Spec("one", 0, 8, 3)]
    run(policy, trace)
    assert policy.counter("default") == 64 + 3


def test_without_aging_the_longest_prefix_goes_first_however_long_others_wait():
    hot = [Spec(f"h{i}", i * MS, 40, 2, ids=(1, 2, 3, 4, 100 + i), id_width=8) for i in range(20)]
    trace = [hot[0], Spec("cold", MS, 40, 2, ids=tuple(range(50, 55)), id_width=8), *hot[1:]]
    keys = {"max_num_seqs": 1, "num_blocks": 40}
    waits = [ends(PrefixReuse(aging_tokens_per_s=aging), trace, **keys)["cold"] for aging in (0.0, 1e6)]
    assert waits[0] > waits[1]


def test_sarathi_sets_the_blocks_of_an_admitted_prompt_aside():
    """Of 12 blocks a prompt of 40 tokens takes 10 at once: the next, which needs three, waits for its end."""
    trace = [Spec("long", 0, 40, 1), Spec("next", 0, 12, 1)]
    keys = {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 24}
    first = {r.request_id: r.first_token_ns for r in run(Sarathi(chunk_size=24), trace, **keys).requests}
    assert first["next"] > first["long"]


def test_chunks_shrink_as_a_prompt_goes_on():
    assert Sarathi(chunk_size=512, low_chunk_size=128, chunk_schedule_stages=4)._chunks == [512, 384, 256, 128]
    assert Sarathi(chunk_size=512)._chunks == [512]


def test_sglang_keeps_room_for_a_share_of_outputs():
    """Two requests whose answers do not fit together: with no share they run side by side, with all of it in turn."""
    trace = [Spec("a", 0, 16, 40), Spec("b", MS, 16, 40)]
    keys = {"num_blocks": 20, "block_size": 4, "max_num_batched_tokens": 32}

    def preempted(conservativeness):
        policy = SGLangLPM(conservativeness=conservativeness, clip_max_new_tokens=40)
        return sum(request.num_preemptions for request in run(policy, trace, **keys).requests)

    assert preempted(2.0) == 0 < preempted(0.0)


def test_sglang_takes_the_longest_prefix_unless_too_many_wait():
    trace = [Spec("first", 0, 40, 2, ids=(1, 2, 3, 4, 5), id_width=8)]
    trace += [Spec("cold", MS, 40, 2, ids=(50, 51, 52, 53, 54), id_width=8)]
    trace += [Spec("hot", 2 * MS, 40, 2, ids=(1, 2, 3, 4, 6), id_width=8)]
    keys = {"max_num_seqs": 1, "num_blocks": 60, "max_num_batched_tokens": 64}
    by_prefix = ends(SGLangLPM(), trace, **keys)
    in_order = ends(SGLangLPM(fcfs_above=0), trace, **keys)
    assert by_prefix["hot"] < by_prefix["cold"] and in_order["cold"] < in_order["hot"]


def test_a_standing_is_forgotten_with_its_request():
    policy = FastServe(SLOW)
    outcome = run(policy, [Spec("one", 0, 8, 3)])
    assert not policy._standings
    policy.observe(Arrived(outcome.requests[0]))
    assert len(policy._standings) == 1


@pytest.mark.parametrize(("make", "least"), [
    (lambda w: SJF(prompt_weight=w), 0), (lambda w: SJF(output_weight=w), 0), (lambda w: SRPT(prompt_weight=w), 0),
    (lambda w: SRPT(output_weight=w), 0), (lambda w: PrefixReuse(aging_tokens_per_s=w), 0),
    (lambda w: Fair(client_weights={"a": w}), 1e-9),
])  # fmt: skip
def test_a_weight_may_be_anything_from_the_least_on(make, least):
    for weight in (least, 0.5, 1.0, 1e300):
        make(weight)
    for weight in (-1e-9, -0.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="found"):
            make(weight)


def test_a_share_of_nothing_is_none():
    with pytest.raises(ValueError, match=r"policy\.client_weights\.a: expected a share above 0, found 0"):
        Fair(client_weights={"a": 0})
