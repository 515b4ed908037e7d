"""The first screen of a report, and the requests behind a verdict."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.experiments.analysis.report_answers import place_of, primary_of, sentences, slowest, words_of

SURE = {"change": -0.25, "low": -0.3, "high": -0.2, "level": 0.95, "needed": None}
NONE = {"change": 0.1, "low": None, "high": None, "level": 0.95, "needed": None}


def answer(verdict, condition="", **numbers):
    refused = numbers.pop("refused", None)
    finding = {"metric": "ttft/p99", "primary": True, "scale": "ratio", "verdict": verdict, **SURE, **numbers}
    other = {**finding, "primary": False, "metric": "e2e/mean", "verdict": "worse"}
    words = {"condition": condition, "variant": "b", "baseline": "a", "pairs": 9, "refused": refused}
    return {**words, "findings": [other, finding]}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (answer("better"), "b is better than a: TTFT p99 -25.0%, between -30.0% and -20.0% with 95% confidence (9"),
        (answer("worse", "rate=4"), "rate=4: b is worse than a: TTFT p99 -25.0%, between"),
        (answer("inconclusive", needed=1234), "It is open whether b or a is better: TTFT p99"),
        (answer("inconclusive", needed=1234), "9 pairs, about 1,234 would decide."),
        (answer("inconclusive"), "more than 10,000 would decide."),
        (answer("small"), "b and a do not differ by what matters: TTFT p99 -25.0%"),
        (answer("equal", change=0.0), "b and a do not differ by what matters: TTFT p99 +0.0%"),
        (answer("not judged", **NONE), "b against a is not judged: TTFT p99 +10.0%; one pair judges nothing"),
        (answer("not judged", refused="limits differ", **NONE), "TTFT p99 +10.0%; limits differ."),
        (answer("not judged", **{**NONE, "change": None}), "b against a is not judged: TTFT p99; one pair"),
    ],
)
def test_a_question_is_answered_in_a_sentence(asked, told):
    (sentence,) = sentences({"answers": [asked]})
    assert told in sentence


def test_what_is_decided_comes_first_and_what_has_no_finding_is_left_out():
    empty = {**answer("better"), "findings": []}
    asked = [answer("not judged"), empty, answer("inconclusive"), answer("worse"), answer("better")]
    told = sentences({"answers": asked})
    words = ("is better than", "is worse than", "is open", "is not judged")
    assert len(told) == 4 and all(word in sentence for word, sentence in zip(words, told, strict=True))
    assert sentences(None) == [] and primary_of(empty) is None


def test_metrics_are_named_as_in_tables_without_their_unit():
    assert [words_of(key) for key in ("ttft/p99", "slo/attainment", "goodput/requests_per_s", "class/x/ttft_p99")] == [
        "TTFT p99", "SLO met", "goodput", "class/x/ttft_p99",
    ]  # fmt: skip


def test_a_variant_is_found_by_its_words_in_whatever_order():
    names = ["fcfs workload.arrivals.rate=4", "sjf workload.arrivals.rate=4", "sjf"]
    assert place_of("sjf", "workload.arrivals.rate=4", names) == 2
    assert place_of("sjf", "", names) == 3 and place_of("sjf", "seed=1", names) is None


STAMP = st.integers(0, 40)


@given(st.lists(st.tuples(STAMP, STAMP, STAMP, STAMP, st.booleans()), max_size=20), st.integers(1, 8))
def test_the_slowest_are_those_of_a_plain_sort(spans, most):
    arrival, queue, prefill, decode = (np.array([row[i] for row in spans], dtype=float) for i in range(4))
    served = np.array([row[4] for row in spans], dtype=bool)
    unknown = np.where(served, 0.0, np.nan)

    columns = {
        "request_id": [str(row) for row in range(len(spans))],
        "arrival_s": arrival,
        "first_scheduled_s": arrival + queue + unknown,
        "first_token_s": arrival + queue + prefill + unknown,
        "finished_s": arrival + queue + prefill + decode + unknown,
        "delivery_s": np.zeros(len(spans)),
        "prompt_tokens": np.ones(len(spans), dtype=int),
        "output_tokens": np.arange(len(spans)),
        "preemptions": np.zeros(len(spans), dtype=int),
    }

    found = slowest(SimpleNamespace(requests=columns), most)
    ttft = (queue + prefill)[served]
    assert [request.ttft for request in found] == pytest.approx(sorted(ttft.tolist(), reverse=True)[:most])
    for request in found:
        row = int(request.request_id)
        parts = (request.queue, request.prefill, request.decode)
        assert parts == pytest.approx((queue[row], prefill[row], decode[row]))
        assert request.whole == pytest.approx(queue[row] + prefill[row] + decode[row])
        assert (request.tpot is None) == (row < 2)
