"""The Triton kernels run by Triton's interpreter on CPU tensors.

Interpreter or compiler is decided when triton is imported, so this folder is a process of its own:
`pytest tests/kernels/interpreter`.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

assert "triton" not in sys.modules, "run tests/kernels/interpreter on its own: triton is imported already"
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.register_assert_rewrite("cases", "shared_attention", "shared_pointwise", "shared_sampling")


def pytest_configure(config):
    settings.register_profile("interpreter", settings.get_profile("short"), max_examples=8)
    settings.register_profile("full interpreter", settings.get_profile("full"), max_examples=100)
    settings.load_profile("full interpreter" if config.getoption("--full") else "interpreter")
    config.addinivalue_line(
        "filterwarnings", "ignore:overflow encountered in exp:RuntimeWarning"
    )  # saturates, as meant


@pytest.fixture(scope="session")
def ops():
    import torch

    from schedlab.kernels.dispatch import kernels

    torch.set_num_threads(1)
    return kernels("cpu", "triton")
