"""The torch implementations against the reference, by the tests that the Triton kernels pass too."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("cases", "shared_attention", "shared_pointwise", "shared_sampling")

from shared_attention import *  # noqa: E402, F403
from shared_pointwise import *  # noqa: E402, F403
from shared_sampling import *  # noqa: E402, F403

from schedlab.kernels.dispatch import kernels  # noqa: E402


@pytest.fixture(scope="session", params=["torch", "reference"])
def ops(request):
    torch.set_num_threads(1)
    return kernels("cpu", request.param)
