"""Sampling parameters of a batch as arrays and tensors, and the seed of each request. Knows no logits."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from schedlab.framework.batch import Inputs
from schedlab.framework.request import EngineRequest, SamplingParams

GREEDY = SamplingParams()


def sampling_tensors(inputs: Inputs, sampling_seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """(temperatures, top_ks, top_ps, seeds, positions), each [S], of the grants that emit."""
    seeds, top_ks, temperatures, top_ps = (
        torch.from_numpy(array).to(device) for array in sampling_arrays(inputs, sampling_seed)
    )
    return temperatures, top_ks, top_ps, seeds, torch.from_numpy(inputs.output_positions_S).to(device)


def sampling_arrays(inputs: Inputs, sampling_seed: int) -> tuple[np.ndarray, ...]:
    """(seeds, top_ks, temperatures, top_ps), int64 and float64 [S], of the grants that emit."""
    requests = [inputs.requests[grant] for grant in inputs.emitting_S.tolist()]
    params = [request.sampling or GREEDY for request in requests]
    return (
        np.array([request_seed(r, sampling_seed) for r in requests], dtype=np.int64),
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([p.temperature for p in params], dtype=np.float64),
        np.array([p.top_p for p in params], dtype=np.float64),
    )


def request_seed(request: EngineRequest, sampling_seed: int) -> int:
    """The request's own seed, or one from (sampling_seed, logical_id); 0 for a greedy request, which needs none."""
    params = request.sampling or GREEDY
    if params.seed is not None or params.temperature == 0:
        return (params.seed or 0) & (1 << 63) - 1
    return _named_seed(sampling_seed, request.logical_id)


@lru_cache(maxsize=1 << 14)
def _named_seed(sampling_seed: int, request_id: str) -> int:
    """Asked for at every step of a request: kept for more of them than run at a time."""
    named = hashlib.blake2b(f"{sampling_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(named, "little") >> 1
