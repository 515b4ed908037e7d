"""Norm, activation, rotation and cache write against the reference, and what these wrappers refuse."""

import pytest
import torch
from shared_pointwise import *  # noqa: F403
from shared_pointwise import Write, normal


def test_offsets_beyond_int32(ops):
    """A slot, a token and a row past 2³¹ elements; memory is committed only where it is written."""
    write = Write(heads=2, kv_heads=1, dtype=torch.float16, slots=(3,))
    write.run(ops)
    pools = [torch.empty(2**31 // 1024 + 2, 16, 1, 64, dtype=torch.float16) for _ in range(2)]
    last = len(pools[0]) - 1
    far = Write(heads=2, kv_heads=1, dtype=torch.float16, slots=(last * 16 + 3,))
    far.k_cache, far.v_cache = pools
    far.run(ops)
    assert torch.equal(pools[0][last, 3], write.k_cache[0, 3])
    assert torch.equal(pools[1][last, 3], write.v_cache[0, 3])


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("q", torch.Tensor.double, "q must be bfloat16, float16 or float32"),
        ("k", lambda k: k[:, :1], r"k must be of shape \[6, 2, 64\], got \[6, 1, 64\]"),
        ("v", lambda v: v.half(), "v must be torch.float32, got torch.float16"),
        ("cos", lambda c: c[:3], r"cos must be of shape \[6, 32\], got \[3, 32\]"),
        ("sin", lambda s: s.half(), "sin must be like cos"),
        ("sin", lambda s: s[:, :16], r"sin must be of shape \[6, 32\], got \[6, 16\]"),
        ("slots", lambda s: s[:-1], r"slots must be of shape \[6\], got \[5\]"),
        ("slots", lambda s: s.float(), "slots must be int32 or int64"),
        ("slots", lambda s: s * 0, r"slots must be unique but for -1"),
        ("slots", lambda s: s + 1, r"slots must be -1 or in 0 .. 63"),
        ("k_cache", lambda k: k[..., :32], "v_cache must be like k_cache"),
    ],
)
def test_wrong_writes_are_named(ops, field, change, message):
    write = Write()
    setattr(write, field, change(getattr(write, field)))
    with pytest.raises(ValueError, match=f"^rope_kv_write: {message}"):
        write.run(ops)


def test_rotation_wider_than_a_head_is_named(ops):
    with pytest.raises(
        ValueError, match="rope_kv_write: cos must be of 1 to 32 columns, half of the rotary part, got 40"
    ):
        Write(half=40).run(ops)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((normal(4, 8).double(), normal(8), 1e-6), "x must be bfloat16, float16 or float32, got torch.float64"),
        ((normal(4, 16)[:, ::2], normal(8), 1e-6), "x must be contiguous in its last dimension"),
        ((normal(4, 8), normal(9), 1e-6), r"weight must be of shape \[8\], got \[9\]"),
        ((normal(4, 8), normal(8).half(), 1e-6), "weight must be torch.float32, got torch.float16"),
        ((normal(4, 8), normal(8), 1e-6, normal(3, 8)), r"residual must be of shape \[4, 8\], got \[3, 8\]"),
        ((normal(4, 2, 8), normal(8), 1e-6, normal(4, 2, 8)), "residual must be a tensor of 2 dimensions, got 3"),
    ],
)
def test_wrong_norms_are_named(ops, arguments, message):
    with pytest.raises(ValueError, match=f"^rms_norm: {message}"):
        ops.rms_norm(*arguments)


def test_wrong_activations_are_named(ops):
    with pytest.raises(ValueError, match="silu_mul: gate_up must be of an even width, gate and up, got 7"):
        ops.silu_mul(normal(2, 7))
    with pytest.raises(ValueError, match=r"silu_mul: out must be of shape \[2, 4\], got \[2, 8\]"):
        ops.silu_mul(normal(2, 8), out=normal(2, 8))


def test_rows_have_the_same_bits_in_any_batch(ops):
    x, weight = normal(9, 96), normal(96, seed=1)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6)[5:6], ops.rms_norm(x[5:6], weight, 1e-6))
    assert torch.equal(ops.silu_mul(x)[5:6], ops.silu_mul(x[5:6]))
