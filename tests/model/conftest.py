import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests: paged, checkpoints


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors on shared cores: threads would only wait for each other."""
    torch.set_num_threads(1)
