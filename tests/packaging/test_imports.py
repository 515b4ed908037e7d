"""What an import pulls in: the core needs the standard library and numpy, and a virtual run no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"blocked: {name}")
sys.meta_path.insert(0, Blocker())
"""
HEAVY = ("torch", "triton", "transformers", "safetensors")
EXPERIMENTS_ONLY = ("omegaconf", "hydra", "wandb", "rich", "typer", "matplotlib", "pyarrow", "hypothesis", "jinja2")


def run(blocked: tuple[str, ...], code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = f"blocked = {blocked!r}\n{BLOCK}\n{code}"
    return subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=120)


def modules(*folders: str) -> list[str]:
    """Every module below the folders that must import with nothing but numpy."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] in (("framework", "testing"), ("framework", "vllm")) or (
                parts[:2] == ("framework", "model") and parts[2:] != ("config",)
            ):
                continue  # the conformance kit needs hypothesis; the model is what torch is for; the third needs vLLM
            found.append(".".join(["schedlab", *parts]).removesuffix(".__init__"))
    return found


def test_schedlab_itself_imports_almost_nothing(tmp_path):
    done = run((*HEAVY, *EXPERIMENTS_ONLY, "numpy"), "import schedlab; print(schedlab.__version__)", tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_core_imports_with_numpy_alone(tmp_path):
    code = "import importlib\nfor name in names: importlib.import_module(name)"
    names = modules("framework", "policies", "workloads")
    done = run((*HEAVY, *EXPERIMENTS_ONLY), f"names = {names!r}\n{code}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_run_in_python_needs_neither_torch_nor_hydra(tmp_path):
    code = """
import schedlab
from schedlab.experiments.engines import EngineSetup
from schedlab.framework.engine import EngineConfig
from schedlab.framework.stub import StubExecutor
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.workload import Recorded

engine = EngineSetup("stub", StubExecutor(), EngineConfig(num_blocks=200, max_model_len=4096), ("virtual",))
sample = Recorded(path="embedded:sample.jsonl.gz", format="mooncake", block_size=16, max_requests=10)
result = schedlab.run(FCFS(), sample, engine)
assert result.summary["requests/finished"] == 10 and result.digest
"""
    done = run((*HEAVY, "hydra", "omegaconf", "wandb", "matplotlib", "typer", "rich"), code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_virtual_run_imports_no_torch(tmp_path):
    code = """
sys.argv = ["schedlab", "run", "engine=virtual", "model=llama3.1-8b", "workload.max_requests=20"]
from schedlab.experiments.cli import main
main()
"""
    done = run(HEAVY, code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_importing_the_command_line_is_quick(tmp_path):
    """Help should not wait for libraries that only runs need."""
    slow = (*HEAVY, "wandb", "matplotlib", "hydra", "omegaconf", "numpy")
    done = run(slow, "sys.argv = ['schedlab', '--help']\nfrom schedlab.experiments.cli import main\nmain()", tmp_path)
    assert done.returncode == 0 and "run" in done.stdout, done.stderr


@pytest.mark.parametrize("instead", ["a file", "nothing"])
def test_a_checkout_without_symbolic_links_says_so(instead, tmp_path):
    """As `git clone -c core.symlinks=false` and some unpackers leave it."""
    package = tmp_path / "src" / "schedlab"
    package.mkdir(parents=True)
    for module in (ROOT / "src" / "schedlab").glob("*.py"):
        shutil.copy(module, package)
    if instead == "a file":
        (package / "conf").write_text("../../conf")
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r}); import schedlab.framework"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"ImportError: {package / 'conf'} is no folder"), done.stderr
    assert f"symbolic link to {tmp_path / 'conf'}" in last and "git clone -c core.symlinks=true" in last
