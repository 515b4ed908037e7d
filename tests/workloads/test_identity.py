"""Prefix identity: figures and engine agree with a trie built one id at a time, whatever the widths and scopes."""

import numpy as np
import pytest
import strategies
from hypothesis import assume, given
from hypothesis import strategies as st

from schedlab.workloads.content import SegmentContent
from schedlab.workloads.source import Terms
from schedlab.workloads.statistics import prefix_keys, reuse, reuse_with_memory
from schedlab.workloads.trace import Labels, Trace
from schedlab.workloads.workload import make_source


@st.composite
def prefixed(draw):
    """Traces whose prompts share much, in several scopes, with narrow last ids or segments of their own widths."""
    n, width = draw(st.integers(1, 10)), draw(st.sampled_from([1, 3, 16]))
    rows = [draw(st.lists(st.integers(0, 1), max_size=6)) for _ in range(n)]
    scope = Labels(np.array([draw(st.integers(-1, 1)) for _ in range(n)]), ("u", "v")) if draw(st.booleans()) else None
    if draw(st.booleans()):
        widths = [[draw(st.integers(1, 5)) for _ in row] for row in rows]
        prompts = [max(1, sum(w) + draw(st.integers(0, 2))) for w in widths]
        ids = strategies.ragged(rows, 0, widths)
    else:
        prompts = [max(1, len(row) * width - draw(st.integers(0, width - 1))) for row in rows]
        ids = strategies.ragged(rows, width)
    return Trace("p", np.arange(n), np.arange(n), np.array(prompts), np.ones(n, np.int64), ids=ids, scope=scope)


def segments(trace: Trace, row: int) -> list[tuple[int, int]]:
    """(id, tokens it stands for) of a prompt."""
    ids, left, out = trace.ids.row(row).tolist(), int(trace.prompt_tokens[row]), []
    for place, one in enumerate(ids):
        width = int(trace.ids.row_widths(row)[place]) if trace.ids.widths is not None else min(trace.ids.width, left)
        out.append((one, width))
        left -= width
    return out


@given(prefixed())
def test_reuse_is_that_of_a_trie(trace):
    assume(len(trace.ids.values))
    trie: dict = {}
    reused = whole = 0
    for row in range(len(trace)):
        node, run, mine = trie.setdefault(None if trace.scope is None else trace.scope[row], {}), True, 0
        for step in segments(trace, row):
            run = run and step in node
            mine += step[1] if run else 0
            node = node.setdefault(step, {})
        reused += mine
        whole += mine == trace.prompt_tokens[row]
    found = reuse(trace)
    assert found.prefix * trace.prompt_tokens.sum() == pytest.approx(reused)
    assert found.fully_cached == whole


@given(prefixed(), st.integers(0, 60))
def test_limited_memory_is_an_lru_of_whole_prefixes(trace, capacity):
    assume(len(trace.ids.values))
    kept: list[tuple] = []  # least recently used first
    size = {}
    reused = 0
    for row in range(len(trace)):
        path, nodes = [None if trace.scope is None else trace.scope[row]], []
        for step in segments(trace, row):
            path = [*path, step]
            nodes.append(tuple(path))
            size[nodes[-1]] = step[1]
        for node in nodes:
            if node not in kept:
                break
            reused += size[node]
        for node in reversed(nodes):
            if node in kept:
                kept.remove(node)
            kept.append(node)
        while sum(size[node] for node in kept) > capacity:
            kept.pop(0)
    assert reuse_with_memory(trace, capacity) * trace.prompt_tokens.sum() == pytest.approx(reused)
    assert reuse_with_memory(trace, 10**9) == pytest.approx(reuse(trace).prefix)


@given(prefixed(), st.sampled_from([1, 2, 4, 8]))
def test_engine_blocks_are_equal_where_what_they_cover_is(trace, block_size):
    """A block's key is equal in two prompts just where all ids up to its last token are, width by width."""

    def covering(row: int, block: int):
        covered, path = 0, []
        for step in segments(trace, row):
            path.append(step)
            covered += step[1]
            if covered >= (block + 1) * block_size:
                return (trace.scope[row] if trace.scope is not None else None) or "", tuple(path)
        return None

    keys: dict[bytes, object] = {}
    whole = set()
    for request in make_source(trace, Terms()).pop(10**9):
        if not request.content.has_identity:
            continue
        row, chain = request.source_row, request.content.chain(request.num_prompt_tokens, block_size)
        assert chain.ends == sorted(set(chain.ends))
        for end, key in zip(chain.ends, chain.keys, strict=True):
            path = covering(row, end - 1)
            assert path is not None
            known = keys.setdefault(key, (path, end))
            assert known == (path, end), "equal keys stand for equal prefixes of equal length"
            whole.add((path, end))
    assert len(whole) == len(keys)


def test_an_id_of_512_tokens_covers_32_blocks_of_16_under_one_key():
    ids = strategies.ragged([[1, 2]], 512)
    trace = Trace("t", np.arange(1), np.zeros(1, np.int64), np.array([1000]), np.ones(1, np.int64), ids=ids)
    (request,) = make_source(trace, Terms()).pop(0)
    chain = request.content.chain(1000, 16)
    assert chain.ends == [32, 62] and len(chain.keys) == 2


def test_a_partial_tail_is_shared_only_at_equal_width():
    ids = strategies.ragged([[1, 2], [1, 2], [1, 2]], 16)
    trace = Trace("t", np.arange(3), np.arange(3), np.array([20, 20, 24]), np.ones(3, np.int64), ids=ids)
    assert reuse(trace).prefix * trace.prompt_tokens.sum() == pytest.approx(20 + 16)


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(1, 9), min_size=6, max_size=6), st.integers(0, 9))
def test_equal_segments_are_equal_tokens(ids, widths, rest):
    widths = widths[: len(ids)]
    total = sum(widths) + rest
    content = SegmentContent(ids, widths, "s", seed=3)
    tokens = content.tokens(total, 500)
    assert len(tokens) == total and tokens.min(initial=0) >= 0 and tokens.max(initial=0) < 500
    start = 0
    for segment, width in zip(ids, widths, strict=True):
        assert (
            tokens[start : start + width].tolist()
            == SegmentContent([segment], [width], "s", 3).tokens(width, 500).tolist()
        )
        start += width


def test_a_million_ids_are_keyed_without_a_loop_over_them():
    rng = np.random.default_rng(0)
    rows = 20_000
    ids = strategies.BlockIds(np.arange(rows + 1) * 50, rng.integers(0, 1 << 40, rows * 50), 512)
    trace = Trace("t", np.arange(rows), np.arange(rows), np.full(rows, 25_600), np.ones(rows, np.int64), ids=ids)
    assert len(np.unique(prefix_keys(trace))) == rows * 50, "no two different prefixes met"
