import sys
from pathlib import Path

import pytest
import torch

for folder in ("model", "framework"):  # checkpoints and the four policies are shared with their tests
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
