"""What becomes of memory that a step frees, and of objects that exist before a run."""

import gc
import resource

import pytest
import torch

from schedlab.experiments.engines import settled_heap
from schedlab.framework.model import memory


def pages_touched(megabytes: int) -> int:
    """Pages that the system hands out for a tensor of this size."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(megabytes << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_what_a_step_frees_serves_the_next() -> None:
    if not hasattr(memory.ctypes.CDLL(None), "mallopt"):
        pytest.skip("not glibc's allocator")
    memory.keep_freed_memory()
    pages_touched(24)
    assert pages_touched(24) < 1000, "24 MiB are 6,144 pages"


def test_what_exists_is_left_out_of_collections_for_a_run_only() -> None:
    gc.unfreeze()
    with settled_heap():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
