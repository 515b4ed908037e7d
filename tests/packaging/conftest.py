"""Distributions built once, and an environment in which they are installed as a user's are, away from the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from schedlab import core

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SOURCES = (
    "pyproject.toml", "setup.py", "README.md", "src",
    "conf", "experiments", "framework", "kernels", "policies", "workloads",
)  # fmt: skip


class Built(NamedTuple):
    tree: Path
    wheel: Path
    sdist: Path


class Environment(NamedTuple):
    python: Path
    folder: Path

    def run(self, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WANDB_"))}
        return subprocess.run(
            [str(self.python), *words],
            cwd=self.folder,
            env={**kept, **changes},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def install(self, *what: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps",
             "--no-build-isolation", "--disable-pip-version-check", *what],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A source distribution of a copy of the tree, and a wheel made from nothing but that."""
    tree = tmp_path_factory.mktemp("tree") / "schedlab"
    tree.mkdir()
    for name in filter(lambda name: (ROOT / name).exists(), SOURCES):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "_core_*")
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        str(tree / "dist"),
    ]
    interpreted = {**os.environ, core.OFF: "1"}  # no time for a compiler here
    done = subprocess.run([*command, str(tree)], capture_output=True, text=True, env=interpreted)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = tree.glob("dist/*.whl"), tree.glob("dist/*.tar.gz")
    return Built(tree, wheel, sdist)


@pytest.fixture(scope="session")
def environment(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel, an editable third-party package and a broken one; the dependencies are those of the running tests."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "venv", with_pip=False)
    environment = Environment(folder / "venv" / "bin" / "python", folder)
    site = environment.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    dependencies = Path(pytest.__file__).parents[1]
    (Path(site) / "dependencies.pth").write_text(f"{dependencies}\n")
    third_party = folder / "third_party"
    shutil.copytree(HERE / "third_party", third_party)
    shutil.copytree(HERE / "broken", folder / "broken")
    environment.install(str(built.wheel), str(folder / "broken"))
    environment.install("--editable", str(third_party))
    return environment


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="session")
def names_in_wheel(built: Built) -> set[str]:
    return names_in(built.wheel)
