"""From a trace to the engine: every request once, in order, when it is due, with the content the trace says."""

from itertools import count

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from replay import facts, replay

from schedlab.framework.content import IdContent, SessionContent, TokenContent, UniqueContent
from schedlab.framework.errors import ConfigError, TraceError
from schedlab.framework.request import SLO
from schedlab.workloads.content import SegmentContent
from schedlab.workloads.source import StreamSource, Terms, Until
from schedlab.workloads.trace import Labels, Trace
from schedlab.workloads.workload import make_source

MS = 10**6


def trace(arrivals_ms, prompt=10, output=3, **columns) -> Trace:
    n = len(arrivals_ms)
    full = lambda v: np.full(n, v) if isinstance(v, int) else np.array(v)  # noqa: E731
    return Trace("t", np.arange(n), np.array(arrivals_ms) * MS, full(prompt), full(output), **columns)


def column(*values):
    return np.array(values, dtype=np.int64)


@given(strategies.traces(), st.integers(0, 3), st.data())
def test_every_request_comes_once_and_when_due(random_trace, preparation_ms, data):
    random_trace, terms = strategies.with_stages(random_trace, preparation_ms * MS, 7), Terms(slo=SLO())
    service = data.draw(st.integers(0, 30))
    seen = replay(make_source(random_trace, terms), lambda r: service * MS)
    assert sorted(r.source_row for _, r in seen) == list(range(len(random_trace)))
    at = {request.source_row: (now, request) for now, request in seen}
    for row, (now, request) in at.items():
        followed = -1 if random_trace.after is None else int(random_trace.after[row])
        arrival = int(random_trace.arrival_ns[row])
        if followed >= 0:
            delivered = at[followed][0] + service * MS + 7
            arrival = delivered + int(random_trace.think_ns[row])
            assert request.after == at[followed][1].request_id
        assert request._arrival_ns == arrival and now == request.visible_ns == arrival + preparation_ms * MS
        assert request.recorded_output_tokens == random_trace.output_tokens[row] and request.delivery_ns == 7
    assert [now for now, _ in seen] == sorted(now for now, _ in seen)


@given(strategies.traces(sessions=False), st.integers(1, 5), st.data())
def test_parts_and_pauses_change_nothing(random_trace, size, data):
    whole = [facts(r) for _, r in replay(make_source(random_trace, Terms()))]
    source, got = StreamSource(random_trace.chunks(size), Terms()), []
    while (due := source.peek()) is not None:
        got += source.pop(due + data.draw(st.integers(0, 20)) * MS)
    assert [facts(r) for r in got] == whole
    assert source.pop(10**18) == []


def test_requests_of_one_instant_come_in_trace_order():
    tied = trace(
        [0, 5, 5, 5],
        session=Labels(column(0, -1, 0, -1), ("s",)),
        after=column(-1, -1, 0, -1),
        think_ns=column(-1, -1, 2 * MS, -1),
    )
    source = make_source(tied, Terms())
    (first,) = source.pop(0)
    source.finished(first, 3 * MS)  # the second turn is due at 5 ms, among the others
    assert [r.source_row for r in source.pop(5 * MS)] == [1, 2, 3]


@pytest.mark.parametrize("end", ["finished", "rejected", "aborted", "length_capped", "failed"])
def test_the_next_turn_comes_whatever_the_end(end):
    tied = trace([0, 0], session=Labels(column(0, 0), ("s",)), after=column(-1, 0), think_ns=column(-1, 4 * MS))
    source = make_source(tied, Terms())
    (request,) = source.pop(0)
    assert source.peek() is None, "nothing is pending while the turn runs"
    request._state = end
    source.finished(request, 10 * MS)
    assert source.peek() == 14 * MS


def test_max_tokens_below_a_recorded_output_names_the_row():
    with pytest.raises(TraceError, match=r"t: row 1 has an output of 9 tokens, above max_tokens=8 \(2 such rows\)"):
        make_source(trace([0, 1, 2], output=[3, 9, 12]), Terms(max_tokens=8))
    with pytest.raises(TraceError, match="above max_tokens=2"):
        make_source(trace([0], output=3, max_tokens=column(2)), Terms())
    (request,) = make_source(trace([0], max_tokens=column(5)), Terms(max_tokens=3)).pop(0)
    assert request.max_tokens == 5, "a row's own cap wins"


def test_lengths_are_private_unless_live():
    kept_failure, live = make_source(trace([0, 0], output=[0, -1]), Terms(max_tokens=50)).pop(0)
    assert kept_failure.recorded_output_tokens == 1 and live.recorded_output_tokens is None
    assert kept_failure.max_tokens == live.max_tokens == 50


def test_classes_are_looked_up():
    named = trace([0, 0], slo=Labels(column(0, -1), ("fast",)))
    fast, rest = SLO("fast", 0.1), SLO("rest", 9.0)
    requests = make_source(named, Terms(slo=rest, slo_classes={"fast": fast})).pop(0)
    assert [r.slo for r in requests] == [fast, rest]
    with pytest.raises(ConfigError, match="t: row 0 names SLO class 'fast'; there are none"):
        make_source(named, Terms(slo=rest)).pop(0)


def test_kinds_of_content():
    ids = strategies.ragged([[1, 2], [], [3]], 8)
    plain, tokens = trace([0, 0, 0], ids=ids), trace([0], prompt=3, tokens=strategies.ragged([[7, 8, 9]], 1))
    assert [type(r.content) for r in make_source(plain, Terms()).pop(0)] == [IdContent, UniqueContent, IdContent]
    segments = trace([0], ids=strategies.ragged([[1, 2]], 0, [[4, 5]]))
    assert isinstance(make_source(segments, Terms()).pop(0)[0].content, SegmentContent)
    (request,) = make_source(tokens, Terms()).pop(0)
    assert isinstance(request.content, TokenContent) and request.content.tokens(3, 100).tolist() == [7, 8, 9]


def test_unshared_prompts_differ_by_row_and_seed():
    def prompts(seed):
        return [tuple(r.content.tokens(10, 1000)) for r in make_source(trace([0, 0]), Terms(prompt_seed=seed)).pop(0)]

    assert len({*prompts(0), *prompts(1)}) == 4 and prompts(0) == prompts(0)


def growing(**changes) -> Trace:
    columns = {
        "session": Labels(column(0, 0, 0), ("s",)),
        "turn": column(0, 1, 2),
        "after": column(-1, 0, 1),
        "think_ns": column(-1, 0, 0),
        "grows": np.array([False, True, True]),
        "prompt": [10, 16, 30],
    }
    return trace([0, 0, 0], **(columns | changes))


def answers(source, vocab=1000):
    """Runs a session; each request generates 3 known tokens."""
    number = count(500)
    seen = []
    while (due := source.peek()) is not None:
        (request,) = source.pop(due)
        request.output_token_ids = [next(number) for _ in range(3)]
        seen.append(request)
        source.finished(request, due + 1)
    return seen


def test_a_growing_turn_contains_what_was_really_generated():
    first, second, third = answers(make_source(growing(), Terms(vocab_size=1000)))
    assert second.content.tokens(16, 1000)[:13].tolist() == [*first.content.tokens(10, 1000), 500, 501, 502]
    assert third.content.tokens(30, 1000)[:19].tolist() == [*second.content.tokens(16, 1000), 503, 504, 505]
    assert {r.content.session for r in (first, second, third)} == {"s"}
    assert first.content.chain(12, 4).keys == second.content.chain(16, 4).keys[:3]


def test_a_history_that_shrank_begins_anew():
    first, second, third = answers(make_source(growing(grows=np.array([False, False, True])), Terms(vocab_size=1000)))
    assert [r.content.session for r in (first, second, third)] == ["s", "s/1", "s/1"]
    assert second.content.tokens(10, 1000).tolist() != first.content.tokens(10, 1000).tolist()


def test_without_tokens_only_the_identity_grows():
    first, second, _ = answers(make_source(growing(), Terms()))
    assert isinstance(second.content, SessionContent) and second.content.history is None
    assert first.content.chain(8, 4).keys == second.content.chain(8, 4).keys


def test_nothing_arrives_from_the_stop_on():
    tied = trace(
        [0, 2, 6], session=Labels(column(0, 0, -1), ("s",)), after=column(-1, 0, -1), think_ns=column(-1, 4 * MS, -1)
    )
    source = Until(make_source(tied, Terms()), 5 * MS)
    seen = replay(source, lambda r: 3 * MS)
    assert [r.source_row for _, r in seen] == [0] and source.peek() is None
