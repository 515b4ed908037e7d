"""What the Triton attention kernels promise beyond the reference: the same bits in any batch, any offset, errors."""

import pytest
import torch
from cases import TOLERANCE, Case, build, error
from shared_attention import DECODE, RAGGED

from schedlab.kernels import configs
from schedlab.kernels.attention_decode import decode_workspace
from schedlab.kernels.configs import DecodeTile, PrefillTile

SMALL_PREFILL = PrefillTile(16, 16, 4, 1)
SMALL_DECODE = DecodeTile(16, 32, 4, 1)


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        (Case(contexts=(100, 50), queries=(45, 50), kv_heads=4), SMALL_PREFILL),
        (Case(contexts=(100, 50), queries=(45, 50), kv_heads=4, window=20), SMALL_PREFILL),
        (Case(contexts=(32 * 17 + 5, 64, 31), heads=2, kv_heads=1), SMALL_DECODE),
        (Case(contexts=(32 * 17 + 5, 64, 31), heads=2, kv_heads=1, window=100), SMALL_DECODE),
    ],
    ids=["prefill", "prefill, window", "decode", "decode, window"],
)
def test_many_tiles_and_splits(ops, case, tile):
    """Several trips of every loop; more splits than are combined at once."""
    batch = build(case)
    assert error(batch.run(ops, tile=tile), batch.expected()[0]) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("window", [None, 40])
def test_decode_row_has_the_same_bits_in_any_batch(ops, window):
    """Alone, among others, in another order, in wider tables: splits have a fixed size, who computes one is free."""
    batch = build(Case(contexts=(100, 7, 70), heads=2, kv_heads=1, window=window))
    whole = batch.run(ops, tile=SMALL_DECODE)
    for rows in ([0], [2, 0], [1, 2, 0, 1]):
        assert torch.equal(batch.select(rows).run(ops, tile=SMALL_DECODE), whole[rows])
    padding = torch.full((3, 20), 2**30, dtype=torch.int32)
    wider = batch._replace(tables=torch.cat([batch.tables, padding], 1))
    assert torch.equal(wider.run(ops, tile=SMALL_DECODE), whole)


@pytest.mark.parametrize("window", [None, 40])
def test_prefill_row_has_the_same_bits_in_any_batch_and_chunk(ops, window):
    """Keys are visited in tiles that begin at fixed positions; a tile that is masked for a row changes no bit of it.

    Cuts are at whole tiles of rows: bits of the interpreter's matrix product depend on a row's place in its tile, which
    those of a tensor core do not.
    """
    batch = build(Case(contexts=(60, 30), queries=(60, 23), heads=2, kv_heads=1, window=window))
    whole = batch.run(ops, tile=SMALL_PREFILL)
    assert torch.equal(batch.select([1]).run(ops, tile=SMALL_PREFILL), whole[60:])
    assert torch.equal(batch.select([1, 0]).run(ops, tile=SMALL_PREFILL), torch.cat([whole[60:], whole[:60]]))
    for start, stop in ((0, 8), (8, 40), (40, 60)):
        chunk = batch.select([0])._replace(
            q=batch.q[start:stop], contexts=torch.tensor([stop]), starts=torch.tensor([0, stop - start])
        )
        assert torch.equal(chunk.run(ops, tile=SMALL_PREFILL), whole[start:stop])


def test_one_workspace_serves_every_step(ops):
    """What an earlier, larger step left in the workspace is not read."""
    workspace = decode_workspace(5, 2, 64, 64 * 16, dtype=torch.float32, device="cpu").fill_(torch.nan)
    for contexts in ((600, 40, 513), (10,), (513, 0, 0, 0, 2)):
        batch = build(Case(contexts=contexts, heads=2, kv_heads=1))
        assert error(batch.run(ops, workspace=workspace), batch.expected()[0]) <= 2e-6


def huge_pool(block_bytes_shape):
    """A pool of more than 2³¹ elements; its memory is committed only where it is written."""
    block = torch.Size(block_bytes_shape)
    return torch.empty((2**31 // block.numel() + 2, *block), dtype=torch.float16)


@pytest.mark.parametrize("queries", [None, (20,)], ids=["decode", "prefill"])
def test_offsets_beyond_int32(ops, queries):
    """The last block of a pool of 2³¹ elements; an int32 offset would wrap and read elsewhere."""
    batch = build(Case(contexts=(30,), queries=queries, heads=2, kv_heads=1, dtype=torch.float16, block_size=32))
    pools = []
    for cache in (batch.k_cache, batch.v_cache):
        pools.append(huge_pool(cache.shape[1:]))
        pools[-1][-1] = cache[batch.tables[0, 0]]
    tables = torch.full_like(batch.tables, len(pools[0]) - 1)
    far = batch._replace(k_cache=pools[0], v_cache=pools[1], tables=tables)
    assert torch.equal(far.run(ops), batch.run(ops))


@pytest.mark.parametrize("queries", [None, (1, 1, 1)], ids=["decode", "prefill"])
def test_token_strides_beyond_int32(ops, queries):
    """token * stride of q and out passes 2³¹ too."""
    batch = build(Case(contexts=(3, 4, 5), queries=queries, heads=2, kv_heads=1, dtype=torch.float16))
    stride = 2**30 + 64
    far_q, far_out = (
        torch.empty(2 * stride + 128, dtype=torch.float16).as_strided((3, 2, 64), (stride, 64, 1)) for _ in range(2)
    )
    far_q.copy_(batch.q)
    batch._replace(q=far_q).run(ops, out=far_out)
    assert torch.equal(far_out, batch.run(ops))


def test_lengths_and_blocks_are_checked_where_they_can_be_read(ops):
    """On the device nobody looks; in host memory a wrong table is an error, not a wild read."""
    batch = build(DECODE)
    with pytest.raises(
        ValueError, match=r"decode_attention: context_lens\[1\] must be in 0 .. 624, what 39 blocks hold"
    ):
        batch.contexts[1] = 39 * 16 + 1
        batch.run(ops)
    batch = build(DECODE)
    with pytest.raises(ValueError, match=r"decode_attention: block_tables\[2\] must be in 0 \.\."):
        batch.tables[2, 3] = 2**30
        batch.run(ops)
    batch = build(RAGGED)
    with pytest.raises(ValueError, match="prefill_attention: query_starts must be rising from 0 to 149"):
        batch.starts[-1] = 150
        batch.run(ops)


def half(x):
    return x.half()


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("q", lambda q: q[0], "q must be a tensor of 3 dimensions, got 2"),
        ("q", torch.Tensor.double, "q must be bfloat16, float16 or float32, got torch.float64"),
        ("q", lambda q: q[..., ::2], "q must be contiguous in its last dimension"),
        ("q", lambda q: q[:, :3], "k_cache must be of heads that divide the 3 of q, of size 64, got 2 heads of 64"),
        ("q", half, "k_cache must be torch.float16, got torch.float32"),
        ("k_cache", lambda k: k[0], "k_cache must be a tensor of 4 dimensions, got 3"),
        ("k_cache", half, "k_cache must be torch.float32, got torch.float16"),
        ("v_cache", lambda v: v.transpose(1, 2).contiguous().transpose(1, 2), "v_cache must be like k_cache"),
        ("v_cache", lambda v: v[:-1], "v_cache must be like k_cache"),
        ("tables", lambda t: t.float(), "block_tables must be int32 or int64, got torch.float32"),
        ("tables", lambda t: t[0], r"block_tables must be of shape \[sequences, blocks\]"),
        ("contexts", lambda c: c[:-1], r"context_lens must be of shape \[5\], got \[4\]"),
        ("contexts", lambda c: c.float(), "context_lens must be int32 or int64, got torch.float32"),
    ],
)
@pytest.mark.parametrize("case", [RAGGED, DECODE], ids=["prefill", "decode"])
def test_wrong_arguments_are_named(ops, case, field, change, message):
    batch = build(case)
    with pytest.raises(ValueError, match=rf"^(prefill|decode)_attention: {message}"):
        batch._replace(**{field: change(getattr(batch, field))}).run(ops)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": -1.0}, "scale must be above 0, got -1.0"),
        ({"window": 0}, "window must be at least 1, the query's own key, got 0"),
        ({"softcap": 0.0}, "softcap must be above 0, got 0.0"),
        ({"k_scale": torch.ones(2)}, "k_scale must be a number, or one float32 element on cpu, got"),
        ({"v_scale": torch.ones(1).double()}, "v_scale must be a number, or one float32 element on cpu, got"),
    ],
)
@pytest.mark.parametrize("case", [RAGGED, DECODE], ids=["prefill", "decode"])
def test_wrong_options_are_named(ops, case, options, message):
    batch = build(case)
    with pytest.raises(ValueError, match=rf"^(prefill|decode)_attention: {message}"):
        batch._replace(options=batch.options | options).run(ops)


def test_wrong_outputs_and_workspaces_are_named(ops):
    batch = build(DECODE)
    with pytest.raises(ValueError, match=r"decode_attention: out must be of shape \[5, 4, 64\], got \[5, 4, 32\]"):
        batch.run(ops, out=batch.q[..., :32])
    with pytest.raises(ValueError, match=r"decode_attention: out must be torch.float32, got torch.float16"):
        batch.run(ops, out=batch.q.half())
    with pytest.raises(ValueError, match=r"decode_attention: workspace must be of at least 2600 elements"):
        batch.run(ops, workspace=torch.empty(2599))
    with pytest.raises(ValueError, match=r"decode_attention: workspace must be float32 of one dimension on cpu"):
        batch.run(ops, workspace=torch.empty(9999, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"prefill_attention: query_starts must be of shape \[6\], got \[5\]"):
        build(RAGGED)._replace(starts=torch.arange(5)).run(ops)


def test_decode_of_nothing(ops):
    batch = build(Case(contexts=()))
    assert batch.run(ops).shape == batch.q.shape


def test_sizes_without_a_tile_are_named(ops):
    with pytest.raises(ValueError, match=r"the head size must be at most 128 for torch\.float32, got 192"):
        build(Case(contexts=(5,), head_dim=192)).run(ops)
    with pytest.raises(ValueError, match="the head size must be at most 256, got 320"):
        build(Case(contexts=(5,), head_dim=320, dtype=torch.float16)).run(ops)
    with pytest.raises(ValueError, match="the group of query heads that share a KV head must be at most 32, got 48"):
        build(Case(contexts=(5,), queries=(5,), heads=48, kv_heads=1)).run(ops)


def test_tile_table_depends_on_nothing_of_the_batch():
    """Bits do not depend on the batch because the tile does not: it is a function of head size and type."""
    assert configs.prefill_tile(64, torch.bfloat16) == configs.prefill_tile(40, torch.float16)
    assert configs.decode_tile(128, torch.bfloat16) == configs.decode_tile(80, torch.bfloat16)
