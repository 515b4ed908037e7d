"""What the jobs of a sweep differ in, for the line that tells of each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

ASKED = "multirun.yaml"
"""Hydra's own file in a sweep's directory, with the words of the command line."""


def words_that_vary(sweep: Path, overrides: Mapping[str, str]) -> list[str]:
    """`key=value` of those of a job's `overrides` that the sweep gives several values; none where it left no file."""
    asked = sweep / ASKED
    swept = swept_keys(asked, asked.stat().st_mtime_ns) if asked.exists() else frozenset()
    return [f"{key}={value}" for key, value in overrides.items() if key in swept]


@cache
def swept_keys(asked: Path, mtime_ns: int) -> frozenset[str]:
    """Keys with more than one value in the file as it was at `mtime_ns`."""
    words = OmegaConf.select(OmegaConf.load(asked), "hydra.overrides.task") or ()
    parsed = OverridesParser.create().parse_overrides(list(words))
    return frozenset(found.key_or_group for found in parsed if found.is_sweep_override())
