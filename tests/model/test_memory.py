"""What becomes of memory that a step frees, and of objects that exist before a run."""

import gc
import resource

import pytest
import torch

from schedlab.experiments.engines import settled_heap
from schedlab.framework.model import memory


def pages_touched(tensors: int) -> int:
    """Pages that the system hands out for so many tensors of 24 MiB, 6,144 pages each, which are freed together."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(6 << 20) for _ in range(tensors)]
    touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del held
    return touched


def test_what_a_step_frees_serves_the_next() -> None:
    if not hasattr(memory.ctypes.CDLL(None), "mallopt"):
        pytest.skip("not glibc's allocator")
    memory.keep_freed_memory()
    counts = [pages_touched(6) for _ in range(4)]
    assert counts[-1] < 6144, counts


def test_what_exists_is_left_out_of_collections_for_a_run_only() -> None:
    gc.unfreeze()
    with settled_heap():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
