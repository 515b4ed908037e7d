"""The compiled core: when it is taken, what stands in for it, and that both decide and write the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from schedlab import core

ROOT = Path(__file__).parents[2]
FOLDERS = ("conf", "experiments", "framework", "kernels", "policies", "workloads")
MODE = "from schedlab import core; print(core.mode())"
NATIVE = core.library().exists()
compiled = pytest.mark.skipif(not NATIVE, reason="the core is not compiled here (`make core`)")

RUNS = """
import json, sys
from pathlib import Path
from schedlab import core, engines
from schedlab.experiments.run.api import Experiment
from schedlab.policies import {policies}
from schedlab.workloads.populations import CommonWork

print(core.mode())
for policy in ({made}):
    run = Experiment(policy, CommonWork(num_requests=200, rate=20.0), engines.virtual("llama3.1-8b", "h100")).run()
    tables = {{name: {{key: list(map(str, column)) for key, column in getattr(run, name).items()}}
              for name in ("requests", "steps", "decisions")}}
    print(json.dumps([type(policy).__name__, run.digest, run.summary, tables], sort_keys=True))
""".format(
    policies="chunked_prefill, decode_priority, fcfs, prefix_reuse",
    made="fcfs.FCFS(), chunked_prefill.ChunkedPrefill(chunk_size=512), decode_priority.DecodePriority(), "
    "prefix_reuse.PrefixReuse(chunk_size=512)",
)


def python(*words: str, folder: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with the package of `folder`'s tree or of this one."""
    kept = {name: value for name, value in os.environ.items() if name != core.OFF}
    path = str((folder or ROOT) / "src")
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**kept, "PYTHONPATH": path, **changes},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources without any library."""
    for name in ("src", *FOLDERS):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "_core_*")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def build(tree: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return python("setup.py", "--quiet", "build_ext", "--inplace", folder=tree, **changes)


def test_every_module_has_a_layout_and_a_name_of_its_own():
    layouts = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.pxd")}
    assert {core.layout(module).resolve() for module in core.MODULES} == layouts
    assert all(core.source(module).is_file() for module in core.MODULES)
    assert len({module.rpartition(".")[2] for module in core.MODULES}) == len(core.MODULES)


def test_without_a_library_the_sources_run(tree):
    done = python("-c", MODE, folder=tree)
    assert (done.stdout, done.stderr) == ("interpreted\n", "")


def test_a_library_of_other_sources_is_not_loaded_and_one_line_says_so(tree):
    (tree / "src/schedlab" / f"{core.PREFIX}0123456789abcdef{core.SUFFIX}").write_bytes(b"no library at all")
    done = python("-c", f"{MODE}; import schedlab.framework.results.digest as d; print(d.__file__[-3:])", folder=tree)
    assert done.stdout.split() == ["interpreted", ".py"]
    assert done.stderr.count("\n") == 1 and "make core" in done.stderr


@compiled
@pytest.mark.parametrize("kind", [core.source, core.layout])
def test_an_edited_source_is_not_shadowed(tree, kind):
    module = core.MODULES[-1]
    shutil.copy(core.library(), tree / "src/schedlab")
    assert python("-c", MODE, folder=tree).stdout == "native\n"
    with (tree / "src/schedlab" / kind(module).relative_to(core.PACKAGE)).open("a") as file:
        file.write("# edited\n")
    done = python("-c", MODE, folder=tree)
    assert done.stdout == "interpreted\n" and "make core" in done.stderr


@compiled
def test_it_can_be_switched_off_and_the_command_says_which_it_is():
    for changes, mode in (({}, "native"), ({core.OFF: "1"}, "interpreted")):
        assert python("-m", "schedlab", "--version", **changes).stdout == f"schedlab 0.1.0 ({mode})\n"


@compiled
def test_native_and_interpreted_runs_are_equal():
    native, interpreted = (python("-c", RUNS, **changes) for changes in ({}, {core.OFF: "1"}))
    (mode, *found), (other, *expected) = native.stdout.splitlines(), interpreted.stdout.splitlines()
    assert (mode, other) == ("native", "interpreted"), native.stderr + interpreted.stderr
    assert len(found) == 4 and found == expected


@pytest.mark.parametrize(
    ("words", "changes"), [((), {"CC": "/bin/false"}), ((), {"CC": "/nonexistent/cc"})], ids=["fails", "missing"]
)
def test_a_compiler_that_fails_leaves_the_sources(tree, words, changes):
    done = build(tree, **changes)
    assert done.returncode == 0, done.stderr
    assert "schedlab runs interpreted: its core was not compiled" in done.stdout
    assert not list(tree.glob("src/schedlab/_core_*"))
    assert python("-c", MODE, folder=tree).stdout == "interpreted\n"


def test_an_install_without_a_compiler_succeeds(tree, tmp_path):
    command = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    done = python(*command, "--target", str(tmp_path / "site"), str(tree), folder=tree, CC="/bin/false")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/schedlab/core.py").exists() and not list(tmp_path.glob("site/schedlab/_core_*"))


@pytest.mark.full
@pytest.mark.skipif(not (Path(sysconfig.get_path("include")) / "Python.h").exists(), reason="there is no Python.h")
def test_a_build_makes_what_changed_and_leaves_no_c_file_beside_a_source(tree):
    first, again = build(tree), build(tree)
    assert "schedlab runs native" in first.stdout, first.stdout + first.stderr
    assert again.stdout == "" and python("-c", MODE, folder=tree).stdout == "native\n"
    assert not [path for path in tree.rglob("*.c") if path.relative_to(tree).parts[0] != "build"]
    objects = {path: path.stat().st_mtime_ns for path in tree.glob("build/core/**/*.o")}
    with (tree / "framework/results/digest.py").open("a") as file:
        file.write("# edited\n")
    assert "schedlab runs native" in build(tree).stdout
    assert [path.stem for path, ns in objects.items() if path.stat().st_mtime_ns != ns] == ["digest"]
    assert len(list(tree.glob("src/schedlab/_core_*"))) == 1


def test_the_manifest_says_which_it_is(tmp_path):
    import schedlab
    from schedlab.policies.fcfs import FCFS
    from schedlab.workloads.populations import CommonWork

    schedlab.run(FCFS(), CommonWork(num_requests=2), schedlab.engines.stub(num_blocks=4000), out=tmp_path)
    manifest: dict[str, Any] = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["core"] == core.mode()
