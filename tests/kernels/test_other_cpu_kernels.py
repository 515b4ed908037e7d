"""What every attention kernel of a CPU must get right, for the compiled and the batch-invariant ones."""

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("kernels", "model")]
pytest.register_assert_rewrite("cases", "shared_attention")

from native_build import native, native_folder  # noqa: E402, F401 (fixtures)
from shared_attention import (  # noqa: E402, F401
    test_equal_keys_give_the_mean_at_any_score,
    test_query_without_keys_is_zero,
    test_what_a_query_does_not_see_does_not_spoil_it,
)

from schedlab.kernels.dispatch import kernels  # noqa: E402
from schedlab.kernels.torch_invariant import INVARIANT  # noqa: E402


@pytest.fixture(params=["native", "invariant"])
def ops(request):
    torch.set_num_threads(1)
    if request.param == "invariant":
        return INVARIANT
    request.getfixturevalue("native")
    return kernels("cpu", "native")
