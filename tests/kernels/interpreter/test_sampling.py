"""Sampling against the reference, and what the wrapper refuses."""

import pytest
import torch
from shared_sampling import *  # noqa: F403
from shared_sampling import logits


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(6, 0), r"logits must be of at least one column, got \[6, 0\]"),
        (0, torch.zeros(6, 5).double(), "logits must be bfloat16, float16 or float32"),
        (0, torch.zeros(6, 10)[:, ::2], "logits must be contiguous in its last dimension"),
        (1, torch.zeros(5), r"temperatures must be of shape \[6\], got \[5\]"),
        (1, torch.zeros(6, dtype=torch.int64), "temperatures must be float32 or float64, got torch.int64"),
        (2, torch.zeros(6), "top_ks must be int32 or int64, got torch.float32"),
        (5, torch.zeros(1).long(), r"positions must be of shape \[6\], got \[1\]"),
    ],
)
def test_wrong_arguments_are_named(ops, index, value, message):
    arguments = [
        logits(),
        torch.ones(6),
        torch.zeros(6).long(),
        torch.ones(6),
        torch.zeros(6).long(),
        torch.zeros(6).long(),
    ]
    arguments[index] = value
    with pytest.raises(ValueError, match=f"^sample: {message}"):
        ops.sample(*arguments)


def test_rows_of_a_wider_matrix(ops):
    """Logits of a vocabulary that was padded for the matrix product: rows at a stride."""
    wide = torch.cat([logits(), torch.full((6, 12), 99.0)], 1)
    zeros = torch.zeros(6).long()
    arguments = torch.zeros(6), zeros, torch.ones(6), zeros, zeros
    assert torch.equal(ops.sample(wide[:, :500], *arguments), logits().argmax(-1))
