"""Columns of the CSV files in which kernel times are published, packed or not."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from schedlab.framework.errors import ConfigError


def find(path: str, name: str) -> Path | None:
    """`PATH/name.csv` or `PATH_name.csv`, either packed with gzip; None if there is neither."""
    for stem in (f"{path}/{name}", f"{path}_{name}"):
        for suffix in (".csv", ".csv.gz"):
            if (file := Path(stem + suffix)).is_file():
                return file
    return None


def needed(path: str, name: str) -> Path:
    file = find(path, name)
    if file is None:
        expected = f"{path}/{name}.csv (or {path}_{name}.csv, or packed)"
        raise ConfigError(f"profile import: expected {expected}, found neither")
    return file


def columns(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Columns by name: float64 where every value is a number, else strings. One line for anything else than that."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in names if name not in (reader.fieldnames or ())]
            if missing:
                found = ", ".join(reader.fieldnames or ())
                raise ConfigError(f"{path}: expected the column {missing[0]}, found {found}")
            rows = list(reader)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: expected a CSV file: {error}") from None
    if not rows:
        raise ConfigError(f"{path}: expected rows, found none")
    return {name: numbers([row[name] for row in rows]) for name in names}


def numbers(values: Sequence[str]) -> np.ndarray:
    try:
        return np.asarray([float(value or "nan") for value in values])
    except ValueError:
        return np.asarray(values)
