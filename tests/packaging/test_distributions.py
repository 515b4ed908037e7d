"""What is in the distributions, and that it works where the repository is not."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("conf", "experiments", "framework", "kernels", "policies", "workloads")
QUICK = ("engine=virtual", "model=llama3.1-8b", "hardware=h100", "wandb.mode=disabled", "plots=false", "progress=false")


def files_of(folder: str) -> set[str]:
    kinds = {".py", ".yaml", ".gz", ".md", ".csv", ".json", ".jsonl", ".j2", ".cpp", ".h", ".pxd"}
    left_out = {"__pycache__", "bench"}
    paths = [path for path in (ROOT / folder).rglob("*") if path.is_file() and not left_out & set(path.parts)]
    return {f"schedlab/{path.relative_to(ROOT)}" for path in paths if path.suffix in kinds}


def test_the_wheel_has_every_module_and_data_file(built, names_in_wheel):
    expected = set().union(*(files_of(folder) for folder in FOLDERS))
    expected |= {"schedlab/py.typed", *(f"schedlab/{path.name}" for path in (ROOT / "src/schedlab").glob("*.py"))}
    plugins = ROOT / "src" / "hydra_plugins"
    expected |= {str(path.relative_to(plugins.parent)) for path in plugins.rglob("*.py")}
    assert "hydra_plugins/schedlab_launchers/pool.py" in expected
    assert names_in_wheel == expected
    assert "hydra_plugins/__init__.py" not in names_in_wheel  # a namespace that other distributions share


def test_the_wheel_was_made_from_the_source_distribution(built):
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "src/schedlab/framework/engine.py", "src/schedlab/conf/config.yaml"} <= names


def test_top_level_folders_are_no_packages_of_their_own(names_in_wheel):
    assert {name.partition("/")[0] for name in names_in_wheel} == {"schedlab", "hydra_plugins"}


def test_the_installed_package_is_the_wheel(environment):
    done = environment.run("-c", "import schedlab; print(schedlab.__file__, schedlab.__version__)")
    path, version = done.stdout.split()
    assert path.startswith(str(environment.folder)) and version == "0.1.0"


def test_a_run_in_another_folder(environment):
    done = environment.run("-m", "schedlab", "run", *QUICK, "hydra.run.dir=ran")
    assert done.returncode == 0, done.stderr
    assert json.loads((environment.folder / "ran/result.json").read_text())["status"] == "finished"


def test_what_measures_the_project_stays_in_the_checkout(environment):
    done = environment.run("-m", "schedlab.experiments.bench.cost_model")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No module named 'schedlab.experiments.bench'" in done.stderr
    assert environment.run("-m", "schedlab.experiments.device_check", "--help").returncode == 0


def test_the_console_script(environment):
    script = environment.python.with_name("schedlab")
    done = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "run" in done.stdout


@pytest.mark.parametrize("name", [folder for folder in FOLDERS if folder != "kernels"])
def test_no_module_has_two_identities(name):
    """From the repository's root a folder would import under its bare name, with classes that are not the package's."""
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and f"import this package as schedlab.{name}" in done.stderr


def test_transformers_works_in_the_repository_root():
    """It imports a public package called `kernels`, and finds our folder of that name."""
    code = "import sys; from transformers import LlamaConfig; assert 'triton' not in sys.modules; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr


def test_the_folder_named_like_a_public_package_holds_nothing():
    assert (ROOT / "kernels/__init__.py").read_text() == ""
