import sys
from pathlib import Path

import pytest
import torch

for folder in ("model", "framework"):  # helpers beside the tests: paged, checkpoints; and the four policies
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors on shared cores: threads would only wait for each other."""
    torch.set_num_threads(1)
