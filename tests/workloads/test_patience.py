"""Clients that leave and try again: attempts, pauses, and the books on what was first asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedlab as library
from schedlab.framework.attempts import TIMED_OUT
from schedlab.framework.content import digest
from schedlab.framework.errors import ConfigError, TraceError
from schedlab.framework.model.sampling import request_seed
from schedlab.framework.predictors import NoisyPredictor
from schedlab.framework.request import NS, SLO, SamplingParams
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.arrivals import Poisson
from schedlab.workloads.lengths import Uniform
from schedlab.workloads.patience import Clients, Patience
from schedlab.workloads.populations import Client, Synthetic
from schedlab.workloads.source import Terms
from schedlab.workloads.trace import Labels, Trace
from schedlab.workloads.workload import Offered, make_source

MS = 10**6


def column(*values):
    return np.array(values, dtype=np.int64)


def trace(*arrivals_ms, **columns) -> Trace:
    n = len(arrivals_ms)
    return Trace("t", np.arange(n), column(*arrivals_ms) * MS, np.full(n, 10), np.full(n, 3), **columns)


class Given(Offered):
    """A workload of one trace."""

    def __init__(self, trace, **keys):
        super().__init__(name="given", **keys)
        self.trace = trace

    def load(self, seed=0):
        return self.trace


def end(source, request, state, at_ms, reason=None):
    request._state, request.reason = state, reason
    source.finished(request, at_ms * MS)


def source_of(patience, *arrivals_ms, seed=0, **columns):
    return Clients(patience).around(make_source(trace(*arrivals_ms, **columns), Terms()), seed)


def busy(num_requests=300, rate=60.0, **keys):
    return Synthetic(num_requests=num_requests, arrivals=Poisson(rate), lengths=Uniform([250, 750], [100, 300]), **keys)


def h100(**limits):
    return library.engines.virtual("llama3.1-8b", "h100", **limits)


SECOND = SLO("second", ttft_s=1.0)


def test_a_failed_attempt_comes_again_after_its_pause():
    source = source_of(Patience(retries=2, backoff_s=0.01, factor=3.0), 5)
    (first,) = source.pop(5 * MS)
    end(source, first, "rejected", 7, "queue_full")
    assert source.peek() == 17 * MS
    (second,) = source.pop(17 * MS)
    end(source, second, "rejected", 18, "shed:late")
    assert source.peek() == (18 + 30) * MS
    (third,) = source.pop(48 * MS)
    assert [r.request_id for r in (first, second, third)] == ["0", "0~1", "0~2"]
    assert {r.logical_id for r in (first, second, third)} == {"0"} and third.attempt == 2
    assert third.arrival_ns == 48 * MS and third.tried.first_arrival_ns == 5 * MS
    assert third.content is first.content and third.recorded_output_tokens == 3
    end(source, third, "rejected", 50, "queue_full")
    assert source.peek() is None, "it gives up"


@pytest.mark.parametrize(
    ("state", "reason", "comes_again"),
    [
        ("finished", None, False), ("length_capped", "outgrew", False), ("failed", None, False),
        ("aborted", None, False), ("aborted", TIMED_OUT, True), ("rejected", "rate_limited", True),
        ("rejected", "full, says the router", True), ("rejected", "needs 9 tokens, max_model_len is 8", False),
        ("rejected", "empty: 0 prompt tokens, 3 output tokens", False),
    ],
)  # fmt: skip
def test_what_is_tried_again(state, reason, comes_again):
    source = source_of(Patience(retries=1), 0)
    (request,) = source.pop(0)
    end(source, request, state, 1, reason)
    assert (source.peek() is not None) == comes_again


def test_what_the_workload_withdraws_is_not_asked_for_later():
    source = source_of(Patience(retries=5, backoff_s=0.004), 0, abort_ns=column(9 * MS))
    (request,) = source.pop(0)
    end(source, request, "rejected", 2, "queue_full")
    (again,) = source.pop(6 * MS)
    assert again.abort_ns == 9 * MS
    end(source, again, "rejected", 6, "queue_full")
    assert source.peek() is None


def test_the_next_turn_comes_after_the_last_attempt_and_grows_out_of_it():
    tied = {
        "session": Labels(column(0, 0), ("s",)), "turn": column(0, 1), "after": column(-1, 0),
        "think_ns": column(-1, 4 * MS), "grows": np.array([False, True]),
    }  # fmt: skip
    source = source_of(Patience(retries=1, backoff_s=0.02), 0, 0, **tied)
    (first,) = source.pop(0)
    end(source, first, "aborted", 10, TIMED_OUT)
    (again,) = source.pop(30 * MS)
    assert again.content is first.content and (again.session, again.turn, again.after) == ("s", 0, None)
    end(source, again, "finished", 40)
    (turn,) = source.pop(44 * MS)
    assert turn.request_id == "1" and turn.after == "0", "what is asked for follows what was asked for"


def test_only_who_gave_up_is_a_failure_to_those_who_wait_for_it():
    tied = {"session": Labels(column(0, 0), ("s",)), "after": column(-1, 0), "think_ns": column(-1, 0)}
    for ends, abandoned in ((("rejected", "finished"), 0), (("rejected", "rejected"), 1)):
        inner = make_source(trace(0, 0, **tied), Terms(), abandon=True)
        source = Clients(Patience(retries=1, backoff_s=0.001)).around(inner, 0)
        for at, state in enumerate(ends):
            (request,) = source.pop(source.peek())
            end(source, request, state, 2 * at, "queue_full")
        assert source.abandoned == abandoned and (source.peek() is None) == bool(abandoned)


def test_new_requests_of_an_instant_come_before_retries():
    source = source_of(Patience(retries=1, backoff_s=0.004), 0, 5, 6)
    (first,) = source.pop(0)
    end(source, first, "rejected", 1, "queue_full")
    assert [r.request_id for r in source.pop(6 * MS)] == ["1", "0~1", "2"]


def test_pauses_spread_by_the_name_alone():
    pauses = [Patience(backoff_s=2.0, jitter=0.5).pause_ns(1, digest(b"%d" % i)) / NS for i in range(400)]
    assert 1.0 <= min(pauses) < 1.02 and 2.98 < max(pauses) <= 3.0 and abs(np.mean(pauses) - 2.0) < 0.05
    assert Patience(backoff_s=2.0, factor=2.0).pause_ns(3, b"x") == 8 * NS

    def second_arrival(seed, name):
        names = Labels(column(0), (name,))
        source = source_of(Patience(retries=1, jitter=1.0), 0, seed=seed, request_id=names)
        end(source, source.pop(0)[0], "rejected", 0, "queue_full")
        return source.peek()

    assert second_arrival(0, "a") == second_arrival(0, "a")
    assert len({second_arrival(0, "a"), second_arrival(1, "a"), second_arrival(0, "b")}) == 3


def test_clients_have_patience_of_their_own():
    clients = {
        "hasty": Client(Poisson(30.0), Uniform([250, 750], [100, 300]), patience={"first_token_s": 0.2, "retries": 1}),
        "calm": Client(Poisson(30.0), Uniform([250, 750], [100, 300])),
    }
    workload = Synthetic(num_requests=200, clients=clients)
    requests = library.run(ChunkedPrefill(), workload, h100()).requests
    left = {c for c, reason in zip(requests["client"], requests["reason"], strict=True) if reason == TIMED_OUT}
    again = {c for c, name in zip(requests["client"], requests["request_id"], strict=True) if "~" in name}
    assert left == again == {"hasty"}


@settings(max_examples=5, deadline=None)
@given(st.sampled_from([FCFS, ChunkedPrefill]), st.integers(0, 3), st.booleans())
def test_offers_are_as_many_as_before_whatever_the_attempts(policy, retries, hurry):
    patience = {"retries": retries, "backoff_s": 0.3, "jitter": 0.5, "first_token_s": 0.3 if hurry else None}
    result = library.run(policy(), busy(60, patience=patience), h100(max_num_waiting_reqs=4), slo=SECOND)
    summary, requests = result.summary, result.requests
    assert summary["offered/logical"] == 60
    assert summary["offered/attempts"] == summary["requests/offered"] == len(requests["request_id"])
    assert summary["requests/finished"] + summary["offered/given_up"] == 60
    last = {}
    for name, status, arrival, first in zip(
        *(requests[k] for k in ("request_id", "status", "arrival_s", "first_token_s")), strict=True
    ):  # fmt: skip
        asked = last.setdefault(name.partition("~")[0], [arrival, None])
        asked[0] = min(asked[0], arrival)
        asked[1] = first if status == "finished" else asked[1]
    waits = [first - arrival for arrival, first in last.values() if first is not None]
    assert summary["goodput/share"] == pytest.approx(sum(wait <= 1.0 + 1e-9 for wait in waits) / 60)
    assert summary["offered/ttft/max"] == pytest.approx(max(waits))


def test_attempts_of_a_client_that_leaves_end_when_it_does():
    requests = library.run(FCFS(), busy(patience={"first_token_s": 0.5, "total_s": 3.0}), h100()).requests
    waited = requests["finished_s"] - requests["arrival_s"]
    first = requests["first_token_s"] - requests["arrival_s"]
    gone = np.array([reason == TIMED_OUT for reason in requests["reason"]])
    ended = np.array([status == "finished" for status in requests["status"]])
    early = gone & (waited < 3.0)
    assert (gone | ended).all() and early.any() and (gone & ~early).any()
    assert not (first[early] <= 0.5).any() and (first[ended] <= 0.5).all(), "tokens in time keep a client"
    assert (waited[ended] <= 3.0).all()


def test_without_patience_nothing_is_told_of_it():
    plain, calm = (library.run(FCFS(), busy(40, patience=p), h100()) for p in (None, {}))
    assert plain.digest == calm.digest
    assert not [key for key in plain.summary if key.startswith(("offered/", "goodput/share"))]
    assert calm.summary["offered/logical"] == calm.summary["offered/attempts"] == 40


def test_a_measured_window_is_about_what_was_first_asked_for_in_it():
    workload = busy(200, patience={"retries": 2, "backoff_s": 0.2})
    result = library.run(FCFS(), workload, h100(max_num_waiting_reqs=4), slo=SECOND, start_s=1.0, stop_s=2.0)
    requests = result.requests
    inside = {
        name for name, at in zip(requests["request_id"], requests["arrival_s"], strict=True)
        if "~" not in name and 1.0 <= at < 2.0
    }  # fmt: skip
    attempts = [name for name in requests["request_id"] if name.partition("~")[0] in inside]
    assert result.summary["offered/logical"] == len(inside)
    assert result.summary["offered/attempts"] == len(attempts) > len(inside)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"total_s": 0}, "workload.patience.total_s: expected a time above 0 s, or null for no limit, found 0"),
        ({"retries": -1}, "workload.patience.retries: expected a number of at least 0, found -1"),
        ({"retries": 1.5}, "workload.patience.retries: expected a number, found 1.5"),
        ({"backoff_s": "soon"}, "workload.patience.backoff_s: expected a number, found 'soon'"),
        ({"jitter": 2}, "workload.patience.jitter: expected a share"),
        ({"factor": 0}, "workload.patience.factor: expected a number above 0"),
        ({"backoff_s": -1}, "workload.patience.backoff_s: expected 0 s or more"),
        ({"tries": 3}, "workload.patience.tries: no such key; expected first_token_s, total_s, retries"),
    ],
)
def test_a_wrong_patience_is_one_line(keys, words):
    with pytest.raises(ConfigError, match=words):
        busy(10, patience=keys).source(1000)
    one = Client(Poisson(1.0), Uniform([1, 2], [1, 2]), patience=keys)
    with pytest.raises(ConfigError, match=words.replace("workload.", "workload.clients.c.")):
        Synthetic(num_requests=3, clients={"c": one}).source(1000)


def test_names_that_attempts_would_have_are_refused():
    taken = trace(0, 1, request_id=Labels(column(0, 1), ("a", "a~1")))
    with pytest.raises(TraceError, match="requests 'a' and 'a~1'"):
        Given(taken, patience={"retries": 1}).source(1000)
    Given(taken).source(1000)


def test_attempts_draw_the_same():
    source = source_of(Patience(retries=1, backoff_s=0.0), 0, sampling=Labels(column(0), ('{"temperature":1.0}',)))
    (first,) = source.pop(0)
    end(source, first, "rejected", 0, "queue_full")
    (again,) = source.pop(0)
    assert again.sampling == SamplingParams(temperature=1.0)
    assert request_seed(first, 3) == request_seed(again, 3)
    assert NoisyPredictor(0.5).predict(first) == NoisyPredictor(0.5).predict(again)
