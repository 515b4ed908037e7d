"""Where schedlab's engine and vLLM differ, each with the rule that holds inside vLLM."""

import time

import pytest
import rig
from scripted import InTurn, Scripted, everything

from schedlab.framework.errors import PolicyError, PolicyStalled
from schedlab.framework.policy import Aborted, Admitted, Arrived, Finished, Preempted, Progressed, Rejected

PROMPT = list(range(2, 2 + 100))  # three whole blocks of 32, and four tokens


def asked(name="a", prompt=PROMPT, tokens=4, **extras):
    return rig.Asked(name, list(prompt), tokens, extras)


def run_of(policy, *load, **keys):
    run = rig.Run(rig.scheduler_of(policy, **keys), depth=2 if keys.get("is_async") else 1)
    run.add(*load)
    return run


def names(requests):
    return [request.request_id for request in requests]


# ---- preemption ----


def test_a_swap_becomes_a_recompute_that_is_said_and_counted():
    done = []
    policy = InTurn(everything, lambda step: done.append(step.preempt(step.running[0], "swap")), everything)
    run = run_of(policy, asked(), asked("b"))
    with pytest.raises(PolicyStalled):  # it granted nothing beside
        run.to_end()
    assert done == ["recompute"] and run.scheduler.counters()["swaps_refused"] == 1


def test_who_is_preempted_waits_at_its_own_place_again():
    def preempt_oldest(step):
        step.preempt(step.running[0])
        step.grant_decodes([r for r in step.decoding if r.state == "running"])

    seen = []

    def look(step):
        seen.append(names(step.waiting))
        step.grant_decodes()

    run = run_of(InTurn(everything, preempt_oldest, look, everything), *(asked(n) for n in "abc"), seqs=2)
    load = [asked(n) for n in "abc"]
    run.to_end().check(load)
    assert seen == [["a", "c"]]


def test_a_policy_may_admit_after_a_preemption():
    """vLLM admits nobody in a step that preempts."""

    def trade(step):
        step.preempt(step.running[0])
        step.grant(step.waiting[0])

    run = run_of(InTurn(everything, trade, everything), asked("a"), asked("b"), seqs=1)
    run.step()
    run.step()
    assert [list(out.num_scheduled_tokens) for out in run.outs] == [["a"], ["b"]]
    run.to_end().check([asked("a"), asked("b")])


def test_a_policy_may_admit_a_prompt_whose_blocks_are_not_all_free():
    """vLLM's own loop asks for room for the whole prompt; the policy decides."""
    long = asked("long", prompt=[7] * 200, tokens=2)
    run = run_of(Scripted(lambda step: [step.grant(r, 32) for r in (*step.running, *step.waiting)]), long, blocks=8)
    run.to_end().check([long])


# ---- hold and idle ----


def test_a_hold_is_accepted_and_never_used():
    def decode_and_hold(step):
        if step.waiting or step.prefilling:
            everything(step)
        else:
            step.grant_decodes()
            step.hold()

    policy, load = Scripted(decode_and_hold), [asked("a"), asked("b")]
    count = []
    policy.decide = lambda step: (count.append(1), decode_and_hold(step))
    run_of(policy, *load).to_end().check(load)
    assert len(count) == 4  # one for each token


def test_a_hold_that_is_none_is_refused_as_everywhere():
    def wrong(step):
        everything(step)
        step.hold()

    with pytest.raises(PolicyError, match="hold is legal only when a step grants one token to all of decoding"):
        run_of(Scripted(wrong), asked()).step()


def test_idling_is_cheap_and_an_arrival_wakes():
    woken = []

    def wait_for_two(step):
        if len(step.waiting) + len(step.running) < 2:
            step.idle_until(step.now + 0.5)
        else:
            woken.append(step.now)
            everything(step)

    run = run_of(Scripted(wait_for_two), asked("a"))
    began, calls = time.process_time(), 0
    while calls < 30:
        assert not run.schedule().num_scheduled_tokens
        run.finish()
        calls += 1
    assert run.scheduler.now_ns() >= 29 * 1_000_000  # an empty step sleeps a millisecond
    assert time.process_time() - began < 1
    run.add(asked("b"))
    arrived = run.scheduler.now_ns() / 1e9
    run.schedule()
    assert woken and woken[0] - arrived < 1


def test_idling_ends_by_itself():
    times = []

    def once(step):
        times.append(step.now)
        if len(times) == 1:
            step.idle_until(step.now + 0.02)
        else:
            everything(step)

    run_of(Scripted(once), asked()).to_end().check([asked()])
    assert times[1] - times[0] >= 0.02


def test_idling_into_the_past_is_a_stall():
    with pytest.raises(PolicyStalled, match="never wakes"):
        run_of(Scripted(lambda step: step.idle_until(step.now)), asked()).step()


# ---- the cache ----


def test_blocks_are_reusable_when_their_step_has_run():
    seen = []

    def first(step):
        step.grant(step.waiting[0])
        seen.append((step.cached_tokens(step.waiting[1]), step.pending_tokens(step.waiting[1])))

    def then(step):
        seen.append((step.cached_tokens(step.waiting[0]), step.pending_tokens(step.waiting[0])))
        everything(step)

    run = run_of(InTurn(first, then, everything), asked("a"), asked("b"))
    run.to_end().check([asked("a"), asked("b")])
    assert seen == [(0, 96), (96, 0)]


def test_published_at_once_where_that_is_asked_for():
    seen = []

    def decide(step):
        step.grant(step.waiting[0])
        seen.append(step.cached_tokens(step.waiting[1]))

    run_of(Scripted(decide), asked("a"), asked("b"), publish="schedule").step()
    assert seen == [96]


@pytest.mark.parametrize("chunk", [32, 50, 96])
def test_pending_tokens_are_what_running_prompts_will_publish(chunk):
    seen = []

    def decide(step):
        head, other = step.waiting[:2] if len(step.waiting) > 1 else (step.running[0], step.waiting[0])
        step.grant(head, chunk)
        seen.append((step.cached_tokens(other), step.pending_tokens(other)))

    run = run_of(Scripted(decide), asked("a"), asked("b"))
    run.step()
    run.step()
    whole = chunk // 32 * 32
    assert seen == [(0, 96), (whole, 96 - whole)]


def test_cache_changed_tells_new_ones_changed_ones_and_preempted_ones():
    told = []

    def look(step):
        told.append([(r.request_id, step.cached_tokens(r)) for r in step.cache_changed])

    def first(step):
        look(step)
        step.grant(step.waiting[0])

    def preempting(step):
        look(step)
        step.preempt(step.running[0])
        step.grant(step.waiting[1])

    def then(step):
        look(step)
        everything(step)

    other = asked("other", prompt=[9] * 70)
    policy = InTurn(first, preempting, then, everything)
    run = run_of(policy, asked("a", tokens=8), asked("b"), other)
    for _ in range(3):
        run.step()
    assert told == [[("a", 0), ("b", 0), ("other", 0)], [("b", 96)], [("a", 96)]]
    run.to_end().check([asked("a", tokens=8), asked("b"), other])


def test_blocks_needed_counts_what_this_step_has_granted():
    seen = []

    def decide(step):
        request = step.waiting[0]
        seen.append(step.blocks_needed(request, 100))
        step.grant(request, 40)
        seen.append(step.free_blocks)

    run_of(Scripted(decide), asked(), blocks=10).step()
    assert seen == [4, 8]


def test_a_grant_that_is_taken_back_leaves_nothing_to_find():
    """Preemption in the step of admission: the pool is whole, and nobody hits what was not computed."""
    for publish in ("commit", "schedule"):
        seen = []

        def decide(step, seen=seen):
            first, second = step.waiting
            step.grant(first)
            step.preempt(first)
            seen.append((step.free_blocks, step.cached_tokens(second)))
            step.grant(second)

        run = run_of(InTurn(decide, everything), asked("a"), asked("b"), publish=publish)
        run.step()
        assert seen == [(199, 0)]
        run.to_end().check([asked("a"), asked("b")])


def test_a_running_request_that_is_granted_and_preempted_in_one_step():
    def decide(step):
        step.grant_decodes()
        step.grant(step.prefilling[0], 40)
        step.preempt(step.prefilling[0])

    def chunk(step):
        for request in step.waiting:
            step.grant(request, 50)

    load = [asked("a", tokens=3), asked("b", prompt=[5] * 40, tokens=9)]
    for is_async in (False, True):
        run = run_of(InTurn(chunk, decide, everything), *load, is_async=is_async)
        run.to_end().check(load)


def test_equal_blocks_are_kept_twice():
    """vLLM's behaviour stands: schedlab's own engine would keep one set of blocks."""
    run = run_of(Scripted(everything), asked("a"), asked("b"))
    run.step()
    assert run.scheduler._books.num_free_blocks == 199 - 8


def test_block_0_is_nobodys():
    run = run_of(Scripted(everything), asked(), blocks=10)
    run.step()
    assert run.scheduler._books.num_free_blocks == 6 and 0 not in run.worker.tables["a"]


def test_reset_of_vllms_cache_is_noticed():
    seen = []

    def decide(step):
        seen.append([step.cached_tokens(r) for r in step.waiting])
        everything(step)

    run = run_of(Scripted(decide), asked("a"))
    run.to_end()
    assert run.scheduler.reset_prefix_cache()
    run.add(asked("b"))
    run.to_end().check([asked("a"), asked("b")])
    assert [0] in seen[1:]


def test_running_requests_that_vllm_resets_wait_again():
    load = [asked("a", tokens=9), asked("b", tokens=9)]
    for is_async in (False, True):
        run = run_of(Scripted(everything), *load, is_async=is_async)
        run.step()
        run.step()
        while run.flying:
            run.finish()
        run.scheduler.reset_prefix_cache(reset_running_requests=True)
        run.to_end().check(load)


# ---- two steps in flight ----


def test_a_request_whose_last_token_is_in_flight_is_not_seen():
    seen = []

    def decide(step):
        seen.append((names(step.running), len(step.decoding)))
        everything(step)

    run_of(Scripted(decide), asked("a", tokens=1), asked("b", tokens=3), is_async=True).to_end()
    assert seen == [([], 0), (["b"], 1), (["b"], 1)]


def test_events_come_when_the_step_has_run():
    policy = Scripted(everything)
    run = run_of(policy, asked("a", tokens=1), is_async=True)
    run.schedule()
    assert [type(event) for event in policy.heard] == [Arrived]
    run.finish()
    assert [type(event) for event in policy.heard] == [Arrived, Admitted, Progressed, Finished]
    assert policy.heard[2].prefills[0][1] == 100


def test_what_a_policy_hears_of_a_preemption():
    policy = InTurn(everything, lambda step: (step.preempt(step.running[1]), step.grant_decodes()), everything)
    run_of(policy, asked("a"), asked("b")).to_end()
    heard = [event for event in policy.heard if isinstance(event, Preempted)]
    assert [(event.request.request_id, event.mode) for event in heard] == [("b", "recompute")]
    assert heard[0].request.num_preemptions == 1


# ---- aborts ----


def test_abort_of_a_waiting_a_running_and_a_just_granted_request():
    for is_async in (False, True):
        policy = Scripted(everything)
        load = [asked(n, tokens=8) for n in "abcd"]
        run = run_of(policy, *load, seqs=3, is_async=is_async)
        run.schedule()  # a, b and c have been granted, d waits
        for name in "da":
            run.scheduler.finish_requests(name, rig.ABORTED)
        run.finish()
        run.step()
        run.scheduler.finish_requests("b", rig.ABORTED)  # runs
        run.to_end()
        assert run.streams["c"] == rig.stream_of(load[2])
        rig.assert_empty(run.scheduler)
        assert [e.request.request_id for e in policy.heard if isinstance(e, Aborted)] == ["d", "a", "b"]


def test_what_a_policy_rejects_ends_with_an_error_for_its_client():
    def shed(step):
        for request in list(step.waiting)[2:]:
            step.reject(request, "late")
        for request in list(step.waiting)[:2]:
            step.grant(request)
        step.grant_decodes()

    for is_async in (False, True):
        policy, load = Scripted(shed), [asked(n) for n in "abcd"]
        run = run_of(policy, *load, is_async=is_async)
        run.to_end()
        assert {name: run.reasons[name] for name in "cd"} == {"c": "error", "d": "error"}
        assert run.streams["a"] == rig.stream_of(load[0]) and not run.streams["d"]
        rig.assert_empty(run.scheduler)
        turned_away = [event.request for event in policy.heard if isinstance(event, Rejected)]
        assert sorted((r.request_id, r.state, r.reason) for r in turned_away) == [
            ("c", "rejected", "shed:late"), ("d", "rejected", "shed:late"),
        ]  # fmt: skip


def test_a_step_may_do_nothing_but_reject():
    run = run_of(Scripted(lambda step: [step.reject(r) for r in step.waiting]), asked("a"), asked("b"))
    run.to_end()
    assert run.reasons == {"a": "error", "b": "error"}


# ---- what a request brings along ----


def test_what_vllm_has_no_field_for_comes_in_flat_extra_arguments():
    seen = []
    extras = {"client": "alice", "priority": 3, "deadline_s": 2.5, "session": "s"}
    extras |= {"predicted_output_tokens": 17, "ttft_s": 0.5}
    run_of(Scripted(lambda step: (seen.append(step.waiting[0]), everything(step))), asked(**extras)).step()
    request = seen[0]
    assert (request.client, request.priority, request.session, request.predicted_output_tokens) == ("alice", 3, "s", 17)
    assert request.deadline_s - request.arrival_s == pytest.approx(2.5)
    assert request.slo.ttft_s == 0.5 and request.slo.tpot_s is None


def test_vllms_priority_is_turned_round():
    seen = []
    scheduler = rig.scheduler_of(Scripted(lambda step: (seen.append(step.waiting[0].priority), everything(step))))
    theirs = rig.request_of(asked())
    theirs.priority = 4  # vLLM: the smaller is the more urgent
    scheduler.add_request(theirs)
    scheduler.schedule()
    assert seen == [-4]


@pytest.mark.parametrize(
    ("extras", "told"),
    [
        ({"prio": 3}, "schedlab_prio: no such key; expected schedlab_client"),
        ({"priority": "high"}, "schedlab_priority: expected int, found 'high'"),
        ({"deadline_s": -1.0}, "schedlab_deadline_s: expected a number above 0, found -1.0"),
        ({"predicted_output_tokens": True}, "schedlab_predicted_output_tokens: expected int, found True"),
    ],
)
def test_a_request_with_a_mistake_is_refused_and_the_engine_goes_on(extras, told, caplog):
    run = run_of(Scripted(everything), asked("good"), asked("bad", **extras))
    run.to_end()
    assert run.reasons["bad"] == "error" and not run.streams["bad"]
    assert run.streams["good"] == rig.stream_of(asked("good"))
    rig.assert_empty(run.scheduler)
    with pytest.raises(rig.ConfigError, match=told.replace("(", r"\(")):
        rig.read_extras({f"schedlab_{key}": value for key, value in extras.items()})


def test_a_prompt_that_is_streamed_in_is_refused():
    run = run_of(Scripted(everything), asked("good"))
    theirs = rig.request_of(asked("bad"))
    theirs.resumable = True
    run.streams["bad"] = []
    run.scheduler.add_request(theirs)
    run.to_end()
    assert run.reasons["bad"] == "error"
