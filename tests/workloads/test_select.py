"""Choosing, scaling and replicating: what is kept is as recorded, what is not is counted, what repeats is fresh."""

import numpy as np
import pytest
import strategies
from hypothesis import assume, given
from hypothesis import strategies as st
from replay import replay

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads import select
from schedlab.workloads.arrivals import AllAtOnce, Constant, Poisson
from schedlab.workloads.replicate import bootstrap, copies, leaders
from schedlab.workloads.source import Terms
from schedlab.workloads.statistics import reuse
from schedlab.workloads.streams import stream
from schedlab.workloads.trace import Labels, Trace, concatenate
from schedlab.workloads.workload import Recorded, make_source
from schedlab.workloads.writers import write_mooncake

MS, S = 10**6, 10**9


def trace(arrivals_s, prompt=10, output=3, **columns) -> Trace:
    n = len(arrivals_s)
    full = lambda v: np.full(n, v) if isinstance(v, int) else np.array(v)  # noqa: E731
    return Trace(
        "t", np.arange(n), np.rint(np.array(arrivals_s) * S).astype(np.int64), full(prompt), full(output), **columns
    )


def column(*values):
    return np.array(values, dtype=np.int64)


def sessions(*names):
    return Labels.of(names)


def saved(tmp_path, one: Trace, **options) -> Recorded:
    write_mooncake(one, tmp_path / "t.jsonl")
    return Recorded(path=str(tmp_path / "t.jsonl"), format="mooncake", **options)


# rows


@given(strategies.traces(), st.data())
def test_take_keeps_rows_whole(random_trace, data):
    rows = data.draw(st.lists(st.integers(0, len(random_trace) - 1), min_size=1, unique=True).map(sorted))
    part = random_trace.take(np.array(rows))
    whole = concatenate([random_trace.with_columns(after=None).take(slice(r, r + 1)) for r in rows])
    assert part.with_columns(after=None, slo_classes={}).equals(whole.with_columns(slo_classes={}))
    if random_trace.after is not None:
        for new, old in enumerate(rows):
            followed = int(random_trace.after[old])
            while followed >= 0 and followed not in rows:
                followed = int(random_trace.after[followed])
            assert part.after[new] == (rows.index(followed) if followed >= 0 else -1)


def test_windows_start_again_at_zero_and_count():
    part = select.window(trace([0, 1, 2, 3, 4]), 1, 3)
    assert part.arrival_ns.tolist() == [0, S] and part.source_row.tolist() == [1, 2]
    assert part.provenance.counts == {"outside_window": 3} and part.provenance.origin_ns == S
    with pytest.raises(ConfigError, match=r"window=\[9, 12\] holds none; t spans 4\.0 s"):
        select.window(trace([0, 1, 2, 3, 4]), 9, 12)


def test_turns_cut_from_their_session_are_counted():
    tied = trace([0, 1, 2], session=sessions("s", "s", "s"), after=column(-1, 0, 1), think_ns=column(-1, 5, 5))
    part = select.window(tied, 1, 3)
    assert part.after.tolist() == [-1, 0]
    assert part.provenance.counts == {"outside_window": 1, "turns_cut_from_their_session": 1}


def test_more_requests_than_there_are_need_repeat():
    with pytest.raises(ConfigError, match="max_requests=5, but t has 2; repeat=true starts again"):
        select.first_requests(trace([0, 1]), 5)
    with pytest.raises(ConfigError, match="max_requests=0, expected at least 1"):
        select.first_requests(trace([0]), 0)


def test_laps_have_content_and_sessions_of_their_own():
    ids = strategies.ragged([[1], [1]], 16)
    one = trace([0, 2], ids=ids, session=sessions("s", "s"), after=column(-1, 0), think_ns=column(-1, 7))
    three = select.first_requests(one, 6, repeat=True)
    assert three.arrival_ns.tolist() == [0, 2 * S, 4 * S, 6 * S, 8 * S, 10 * S]
    assert three.after.tolist() == [-1, 0, -1, 2, -1, 4]
    assert three.session.tolist() == ["s", "s", "s#1", "s#1", "s#2", "s#2"]
    assert len(set(three.request_id.tolist())) == 6 and three.provenance.counts == {"repeated": 4}
    assert reuse(three).prefix == reuse(one).prefix, "laps share nothing"
    assert len(replay(make_source(three, Terms()))) == 6


@given(strategies.traces(), st.integers(2, 4))
def test_copies_reuse_nothing_of_each_other(random_trace, number):
    assume(random_trace.ids is not None)
    one, laps = reuse(random_trace), reuse(select.laps(random_trace, number))
    assert laps.unique_blocks == number * one.unique_blocks and laps.prefix == pytest.approx(one.prefix)


def test_unshared_copies_have_other_prompts():
    twice = copies(trace([0, 0]), column(0, 1))
    prompts = {tuple(r.content.tokens(10, 1000)) for r in make_source(twice, Terms()).pop(0)}
    assert len(prompts) == 2


def test_sessions_are_sampled_whole():
    names = [f"s{i % 10}" for i in range(50)]
    many = trace(list(range(50)), session=Labels.of(names))
    part = select.sample_sessions(many, 0.3, stream(0, "x"))
    chosen = set(part.session.tolist())
    assert len(chosen) == 3 and len(part) == 15
    assert part.provenance.counts == {"in_sessions_not_sampled": 35}
    with pytest.raises(ConfigError, match="t has no sessions to sample"):
        select.sample_sessions(trace([0]), 0.5, stream(0, "x"))


# lengths


def long(**columns):
    return trace([0, 1, 2], prompt=[10, 40, 8], output=[5, 10, 30], **columns)


def test_too_long_is_an_error_a_drop_or_a_clip():
    with pytest.raises(TraceError, match=r"t: row 1 has 40 \+ 10 tokens, above max_length=32 \(2 such rows\)"):
        select.limit_length(long(), 32, "error")
    dropped = select.limit_length(long(), 32, "drop")
    assert dropped.source_row.tolist() == [0] and dropped.provenance.counts == {"beyond_max_length": 2}
    clipped = select.limit_length(long(), 32, "clip_prompt")
    assert clipped.prompt_tokens.tolist() == [10, 22, 2] and clipped.provenance.counts == {"prompts_clipped": 2}
    with pytest.raises(TraceError, match="the prompt of row 1 alone fills max_length=32; drop such rows"):
        select.limit_length(long(), 32, "clip_output")
    output = select.limit_length(long(), 41, "clip_output")
    assert output.output_tokens.tolist() == [5, 1, 30] and output.provenance.counts == {"outputs_clipped": 1}
    assert select.limit_length(long(), 50, "error").provenance.counts == {}


def test_ids_are_clipped_along():
    ids = strategies.ragged([[1], [2, 3, 4], [5]], 16)
    clipped = select.limit_length(long(ids=ids), 32, "clip_prompt")
    assert [clipped.ids.row(i).tolist() for i in range(3)] == [[1], [2, 3], [5]]
    assert clipped.ids.token_widths(clipped.prompt_tokens).tolist() == [10, 16, 6, 2]
    segments = strategies.ragged([[1], [2, 3], [5]], 0, [[10], [21, 19], [8]])
    clipped = select.limit_length(long(ids=segments), 32, "clip_prompt")
    assert [clipped.ids.row_widths(i).tolist() for i in range(3)] == [[10], [21, 1], [2]]


# times


def test_scales_multiply_times_and_think_times():
    tied = trace([0, 1, 3], session=sessions("s", "s", None), after=column(-1, 0, -1), think_ns=column(-1, 10, -1))
    slow = select.scale_time(tied, 2.0)
    assert slow.arrival_ns.tolist() == [0, 2 * S, 6 * S] and slow.think_ns.tolist() == [-1, 20, -1]
    assert select.scale_time(tied, 0.5, think_scale=3.0).think_ns.tolist() == [-1, 30, -1]
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"time_scale=.*, expected a finite number above 0"):
            select.scale_time(tied, bad)


def test_target_rate(tmp_path):
    workload = saved(tmp_path, trace([0, 1, 2, 3, 4]), target_rate=2.5)
    assert workload.load().mean_rate == pytest.approx(2.5)
    with pytest.raises(ConfigError, match="both scale times"):
        saved(tmp_path, trace([0, 1]), target_rate=2.5, time_scale=2.0)
    with pytest.raises(ConfigError, match="arrives all at once"):
        saved(tmp_path, trace([0, 0]), target_rate=2.5).load()


@given(st.integers(0, 5))
def test_jitter_stays_in_its_tick_and_keeps_file_order(seed):
    ticks = np.repeat([0.0, 3.0, 5.999], 20)
    spread = select.spread_ticks(trace(ticks), 2.999, stream(seed, "jitter"))
    assert (np.diff(spread.arrival_ns) >= 0).all() and spread.source_row.tolist() == list(range(60))
    moved = spread.arrival_ns - np.rint(ticks * S).astype(np.int64)
    assert moved.min() >= 0 and moved.max() < 2.999 * S and len(np.unique(moved)) == 60
    with pytest.raises(ConfigError, match=r"jitter_s=3\.0, expected above 0, at most 2\.999"):
        select.spread_ticks(trace(ticks), 3.0, stream(seed, "jitter"))


def test_other_arrivals_keep_sessions_whole():
    tied = trace(
        [0, 1, 2, 9], session=sessions("a", "b", "a", None), after=column(-1, -1, 0, -1), think_ns=column(-1, -1, 5, -1)
    )
    again = select.rearrive(tied, Constant(0.1), stream(0, "x"))
    assert again.source_row.tolist() == [0, 2, 1, 3] and again.after.tolist() == [-1, 0, -1, -1]
    assert again.arrival_ns.tolist() == [10 * S, 12 * S, 20 * S, 30 * S]
    assert any("arrivals from Constant(rate=0.1)" in s for s in again.provenance.assumed)
    assert select.rearrive(tied, AllAtOnce(), stream(0, "x")).arrival_ns.tolist() == [0, 0, 0, 2 * S]
    with pytest.raises(ConfigError, match=r"workload\.arrivals: the process ends after 2 arrivals, 3 are needed"):
        select.rearrive(tied, AllAtOnce(2), stream(0, "x"))


def test_untied_turns_need_stamps():
    loose = trace([0, 1], session=sessions("s", "s"), after=column(-1, 0), think_ns=column(-1, 5))
    assert select.untie(loose).after is None
    unstamped = loose.with_columns(stamped=np.array([True, False]))
    with pytest.raises(ConfigError, match="row 1 has no recorded arrival; it can only follow a turn"):
        select.untie(unstamped)


def test_turns_that_contain_output_are_declared():
    tied = trace(
        [0, 1, 2],
        prompt=[10, 13, 15],
        session=sessions("s", "s", "s"),
        after=column(-1, 0, 1),
        think_ns=column(-1, 5, 5),
    )
    grown = select.grow_sessions(tied)
    assert grown.grows.tolist() == [False, True, False]
    assert grown.provenance.counts == {"histories_begun_anew": 1}
    with pytest.raises(ConfigError, match="has block ids"):
        select.grow_sessions(tied.with_columns(ids=strategies.ragged([[1]] * 3, 16)))
    with pytest.raises(ConfigError, match="no turns tied by a delay"):
        select.grow_sessions(trace([0, 1]))


# replicates


def test_seed_0_is_the_trace_as_recorded(tmp_path):
    one = trace([0, 1, 2, 3], ids=strategies.ragged([[1]] * 4, 16))
    assert saved(tmp_path, one, block_size=16).load(0).equals(one)
    with pytest.raises(ConfigError, match="seed=-1, expected 0"):
        saved(tmp_path, one).load(-1)


def test_seeds_cut_disjoint_parts(tmp_path):
    workload = saved(tmp_path, trace(range(10)), max_requests=3)
    parts = [workload.load(seed).source_row.tolist() for seed in range(3)]
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert workload.load(2).arrival_ns[0] == 0
    with pytest.raises(ConfigError, match="seed=3 needs requests 9 to 12 of trace, which has 10: there are 3 disjoint"):
        workload.load(3)
    windows = saved(tmp_path, trace(range(10)), window=[1, 4])
    assert [windows.load(seed).source_row.tolist() for seed in (0, 1)] == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(ConfigError, match=r"overlapping windows are no replicates"):
        windows.load(3)


@given(strategies.traces(max_rows=30), st.integers(1, 50))
def test_bootstraps_repeat_and_keep_sessions_whole(random_trace, seed):
    assume(random_trace.span_s > 0)
    try:
        replica = bootstrap(random_trace, stream(seed, "bootstrap"))
    except ConfigError as error:
        assert "hold no request" in str(error)
        return
    assert replica.equals(bootstrap(random_trace, stream(seed, "bootstrap")))
    assert replica.arrival_ns[0] == 0 and (np.diff(replica.arrival_ns) >= 0).all()
    assert len(set(replica.request_id.tolist())) == len(replica), "every request has a name of its own"
    assert set(replica.source_row.tolist()) <= set(random_trace.source_row.tolist())
    whole = np.bincount(leaders(random_trace), minlength=len(random_trace))
    sizes = np.bincount(leaders(replica), minlength=len(replica))
    for row in np.flatnonzero(sizes).tolist():
        first = int(replica.source_row[row])
        assert sizes[row] == whole[leaders(random_trace)[first]]
    assert len(replay(make_source(replica, Terms(slo_classes=replica.slo_classes)))) == len(replica)


def test_blocks_drawn_again_share_nothing():
    ids = strategies.ragged([[7]] * 40, 16)
    one = trace([i + 0.5 for i in range(40)], ids=ids)
    replica = bootstrap(one, stream(3, "bootstrap"), block_s=10.0)
    copies_made = replica.provenance.counts["blocks_drawn_again"]
    assert copies_made > 0
    scopes = replica.scope.tolist()
    assert len(set(scopes)) > 1
    fresh = {scope: scopes.count(scope) for scope in set(scopes)}
    assert reuse(replica).unique_blocks == len(fresh), "one unseen block in each copy's own space"


def test_arrivals_from_a_process_make_the_replicates(tmp_path):
    workload = saved(tmp_path, trace(range(20)), arrivals=Poisson(2.0))
    zero, one = workload.load(0), workload.load(1)
    assert zero.source_row.tolist() == one.source_row.tolist() and zero.arrival_ns.tolist() != one.arrival_ns.tolist()
    assert zero.equals(workload.load(0))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_sample_replicates(seed):
    workload = Recorded(name="sample", path="embedded:sample.jsonl.gz", format="mooncake", block_size=16)
    replica = workload.load(seed)
    assert not replica.equals(workload.load(0)) and replica.equals(workload.load(seed))
    assert abs(len(replica) - 254) < 130


# messages


@pytest.mark.parametrize(
    "options, said",
    [
        ({"sessions": "open"}, "workload.sessions=open, expected one of tied, recorded"),
        ({"too_long": "clip"}, "workload.too_long=clip, expected one of error, drop, clip_prompt, clip_output"),
        ({"replicates": "yes"}, "workload.replicates=yes, expected one of null, windows, bootstrap"),
        ({"window": [1]}, r"workload\.window=\[1\], expected \[start, stop\] in seconds"),
    ],
)
def test_wrong_words_name_the_right_ones(options, said):
    with pytest.raises(ConfigError, match=said):
        Recorded(**options)


def test_a_missing_file_says_where_to_get_it(tmp_path):
    with pytest.raises(ConfigError, match=r"^workload azure needs workload\.path; obtain the file from there$"):
        Recorded(name="azure", obtain="there").load()
    with pytest.raises(ConfigError, match=r"no such file; obtain it from there$"):
        Recorded(name="azure", obtain="there", path=str(tmp_path / "x")).load()


def test_describe_says_what_will_be_offered(tmp_path):
    workload = saved(tmp_path, trace([0, 1, 2, 3, 4], session=sessions("a", "a", None, None, None)), max_requests=4)
    assert workload.describe().startswith(
        "trace: 4 requests over 3.0 s, 1.33 a second on average, 1 later turns arrive as stamped, whether or not the "
        "turn before has ended, 1 rows beyond max requests (assumed: times in ms; "
    )
