"""What the tests of kernels share: batches to check attention with, and how near to float64 a result has to be."""

import torch

from schedlab.experiments.device.paged_batches import FP8, Batch, Case, build, error
from schedlab.kernels.dispatch import Kernels, kernels

__all__ = ["FP8", "REFERENCE", "TOLERANCE", "Batch", "Case", "build", "check", "error"]

REFERENCE = kernels("cpu", "reference")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Of `error` against float64. The interpreter truncates bfloat16 where a GPU rounds: with rounding, 5e-3 would do."""


def check(ops: Kernels, case: Case) -> None:
    """The output of `ops` is that of the reference, within the type's tolerance."""
    batch = build(case)
    actual, (expected, _) = batch.run(ops), batch.expected()
    assert actual.dtype == case.dtype
    assert error(actual, expected) <= TOLERANCE[case.dtype], case
