"""The prefix cache against a slow model of its contract, and how much of a shared prompt is reused to the token."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import MS, Script, ScriptedExecutor, lab
from shadowed_cache import ShadowedCache
from slow_cache import SlowRequest

from schedlab.framework.content import IdContent, SessionContent, TokenContent, UniqueContent
from schedlab.framework.request import EngineRequest

SEEDS = st.integers(0, 2**32)


@given(SEEDS)
def test_the_cache_does_what_the_slow_model_does(seed):
    ShadowedCache(random.Random(seed)).drive(steps=150)


# -- what is reused, to the token -------------------------------------------------------------------------------------


def reused(first, second, num_tokens, block_size, second_tokens=None):
    """Tokens of `second` that are reused after `first` has run."""
    requests = [
        EngineRequest("first", 0, num_tokens, first, recorded_output_tokens=1),
        EngineRequest("second", 50 * MS, second_tokens or num_tokens, second, recorded_output_tokens=1),
    ]
    keys = {"num_blocks": 8192 // block_size, "max_model_len": 4096, "max_num_batched_tokens": 4096}
    lab(Script(), requests, executor=ScriptedExecutor(1), block_size=block_size, **keys).finish()
    return requests[1].cached_tokens


def sharing_1000(kind):
    """Two prompts of 1,024 tokens of which the first 1,000 are the same."""
    if kind == "tokens":
        tokens = list(range(5000, 6024))
        return TokenContent(tokens), TokenContent(tokens[:1000] + [7] * 24)
    width = int(kind.split()[-1])
    ids = tuple(range(1000 // width)), -(-24 // width)
    return [IdContent((*ids[0], *range(at, at + ids[1])), width) for at in (10_000, 20_000)]


@pytest.mark.parametrize("block_size, tokens", [(16, 992), (1, 1000), (64, 960), (256, 768)])
@pytest.mark.parametrize("kind", ["tokens", "ids of 1", "ids of 8", "ids of 1000"])
def test_a_prompt_of_1024_with_1000_shared(kind, block_size, tokens):
    first, second = sharing_1000(kind)
    assert reused(first, second, 1024, block_size) == tokens


@pytest.mark.parametrize("block_size", [16, 1, 64, 256, 512, 7, 48, 100, 513, 1024])
def test_ids_of_512_tokens_at_any_block_size(block_size):
    """1,300 tokens are ids of 512, 512 and 276 tokens."""

    def whole(tokens):
        return tokens // block_size * block_size

    base = IdContent((1, 2, 3), 512)
    assert reused(base, IdContent((1, 2, 3), 512), 1300, block_size) == whole(1299), "the last token is computed"
    assert reused(base, IdContent((1, 2, 4), 512), 1300, block_size) == whole(1024)
    assert reused(base, IdContent((1, 3, 2), 512), 1300, block_size) == whole(512)
    assert reused(base, IdContent((2, 1, 3), 512), 1300, block_size) == 0


@pytest.mark.parametrize("block_size", [16, 1, 7, 48, 100])
def test_a_partial_tail_is_shared_only_by_an_equal_id_of_equal_width(block_size):
    def whole(tokens):
        return tokens // block_size * block_size

    first, second = IdContent((1, 2, 3), 512), IdContent((1, 2, 3), 512)
    assert reused(first, second, 1300, block_size) == whole(1299)
    for other in (1299, 1301, 1400, 1536):
        assert reused(first, second, 1300, block_size, other) == whole(1024)
        assert reused(first, second, other, block_size, 1300) == whole(1024)
    longer = IdContent((1, 2, 3, 4), 512)
    assert reused(first, longer, 1300, block_size, 1800) == whole(1024), "the same id, whole in one of them"


def test_tokens_behind_the_last_id_are_nobody_else_s():
    assert reused(IdContent((1, 2), 512), IdContent((1, 2), 512), 1300, 16) == 1024


def test_prompts_without_identity_are_never_shared():
    assert reused(UniqueContent(1), UniqueContent(1), 64, 16) is None
    assert reused(IdContent((1,), 64, "here"), IdContent((1,), 64, "there"), 64, 16) == 0


@pytest.mark.parametrize("one, other", [(-1, -2), (0, 2**61 - 1), (1, 2**61), (7, 7 + 2**64)])
def test_ids_whose_hashes_collide_share_nothing(one, other):
    """`hash()` of both is the same, and so are their lowest 64 bits in the last case."""
    assert hash(one) == hash(other) or one == other % 2**64
    assert reused(IdContent((one,), 64), IdContent((one,), 64), 64, 16) == 48
    assert reused(IdContent((one,), 64), IdContent((other,), 64), 64, 16) == 0


@pytest.mark.parametrize("output, block_size, hit", [(4, 4, 12), (5, 4, 16), (1, 4, 12), (6, 1, 17), (6, 16, 16)])
def test_the_next_turn_of_a_session_reuses_what_the_last_one_generated(output, block_size, hit):
    """12 prompt tokens and `output` generated ones, the newest of which never entered the cache."""
    first = EngineRequest("first", 0, 12, SessionContent("s"), recorded_output_tokens=output)
    second = EngineRequest("second", 50 * MS, 40, SessionContent("s"), recorded_output_tokens=1)
    lab(Script(), [first, second], block_size=block_size, num_blocks=200).finish()
    assert second.cached_tokens == hit


# -- eviction by hand -------------------------------------------------------------------------------------------------


def left_after(blocks, *, num_blocks=8):
    """a, then b leave two cached blocks each in a pool of 8; somebody takes `blocks`: how much is left of each."""
    contents = {name: IdContent((i, i + 100), 4) for i, name in enumerate("ab", 1)}
    trace = [EngineRequest(n, i * 5 * MS, 8, c, recorded_output_tokens=1) for i, (n, c) in enumerate(contents.items())]
    trace.append(EngineRequest("taker", 20 * MS, 4 * blocks, UniqueContent(1), recorded_output_tokens=1))
    made = lab(Script(), trace, num_blocks=num_blocks)
    made.finish()
    cache = made.engine.ledger.cache
    return [cache.longest_hit(content.chain(8, 4), 2) for content in contents.values()]


@pytest.mark.parametrize("blocks, left", [(4, [2, 2]), (5, [1, 2]), (6, [0, 2]), (7, [0, 1]), (8, [0, 0])])
def test_blocks_without_content_go_first_then_the_least_recently_used_tail_first(blocks, left):
    assert left_after(blocks) == left


def test_recency_is_that_of_the_last_owner_s_leave():
    """a leaves before b, and is then used once more: b is the older one."""
    contents = [IdContent((1, 101), 4), IdContent((2, 102), 4)]
    trace = [EngineRequest(f"r{i}", i * 5 * MS, 8, contents[i % 2], recorded_output_tokens=1) for i in range(3)]
    trace.append(EngineRequest("taker", 30 * MS, 20, UniqueContent(1), recorded_output_tokens=1))
    made = lab(Script(), trace, num_blocks=8)
    made.finish()
    assert [made.engine.ledger.cache.longest_hit(c.chain(8, 4), 2) for c in contents] == [2, 1]


# -- identity ---------------------------------------------------------------------------------------------------------

small_ids = st.lists(st.sampled_from([1, 2, 12, 21, 121, 112]), min_size=1, max_size=6)


@given(small_ids, small_ids, st.integers(1, 4), st.integers(1, 5), st.integers(1, 24), st.integers(1, 24))
def test_ids_are_equal_exactly_where_ids_and_widths_are(first, second, width, size, tokens, other_tokens):
    """Compared with names that spell the whole prefix out, so that no two different prefixes may look alike."""
    contents = [IdContent(first, width), IdContent(second, width)]
    lengths = [min(tokens, width * len(first)), min(other_tokens, width * len(second))]
    requests = [SlowRequest("r", c, n, size) for c, n in zip(contents, lengths, strict=True)]
    names = [r.blocks(0, r.prompt // size) for r in requests]
    chains = [c.chain(n, size) for c, n in zip(contents, lengths, strict=True)]
    assert [chain.num_blocks for chain in chains] == [len(name) for name in names]
    expanded = [[key for group, key in enumerate(chain.keys) for _ in blocks_of(chain, group)] for chain in chains]
    for a, b, key_a, key_b in zip(*names, *expanded, strict=False):
        assert (a[0] == b[0]) == (key_a == key_b)


def blocks_of(chain, group):
    return range(chain.ends[group - 1] if group else 0, chain.ends[group])


token_lists = st.lists(st.integers(0, 2), max_size=12)


@given(token_lists, token_lists, st.integers(1, 4))
def test_tokens_are_equal_exactly_where_the_whole_prefix_is(first, second, size):
    chains = [TokenContent(tokens).chain(len(tokens), size) for tokens in (first, second)]
    for block, (a, b) in enumerate(zip(chains[0].keys, chains[1].keys, strict=False)):
        stop = (block + 1) * size
        assert (a == b) == (first[:stop] == second[:stop])


def test_no_two_kinds_of_content_share_a_key():
    contents = [
        TokenContent([1] * 32),
        IdContent([1] * 8, 4),
        IdContent([1] * 8, 4, "1"),
        IdContent([1] * 4, 8),
        IdContent([11] * 8, 4),
        SessionContent("1"),
        SessionContent("1:4"),
        SessionContent(""),
    ]
    keys = [key for content in contents for key in content.chain(32, 4).keys]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {16}


@given(small_ids, small_ids, st.integers(1, 5), st.integers(1, 4))
def test_equal_identity_means_equal_tokens(first, second, width, size):
    contents = [IdContent(first, width), IdContent(second, width)]
    count = width * min(len(first), len(second))
    chains, tokens = [c.chain(count, size) for c in contents], [c.tokens(count, 50).tolist() for c in contents]
    for group, (a, b) in enumerate(zip(chains[0].keys, chains[1].keys, strict=False)):
        if a == b:
            stop = chains[0].ends[group] * size
            assert tokens[0][:stop] == tokens[1][:stop]
