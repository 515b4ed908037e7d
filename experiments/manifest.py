"""What a run was made of: versions, code, machine, workload, seeds and the resolved configuration.

Knows how to ask the system; knows nothing of results. Imports no torch: versions come from package metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import schedlab
from schedlab.experiments.compose import distribution_of

PACKAGES = ("numpy", "torch", "triton", "transformers", "safetensors", "hydra-core", "omegaconf", "wandb")
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", "PYTHONHASHSEED")
NOT_OF_THE_RESULT = ("wandb", "progress", "plots", "log_format")
"""Top-level keys that change no number of a run, and so are not part of its hash."""


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash of the resolved configuration, the same for runs that must give the same numbers on the same machine."""
    kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_RESULT}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]
