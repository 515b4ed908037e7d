"""A package made by `policy new`: installed beside schedlab, its policy is an option, is listed, runs and conforms."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib

import pytest

from schedlab.experiments.policy import new_package
from schedlab.framework.errors import ConfigError

QUICK = ("engine=stub", "wandb.mode=disabled", "plots=false", "progress=false", "workload.max_requests=12")


@pytest.fixture(scope="module")
def made(environment):
    """`policy new quick-first` in the user's folder, installed."""
    done = environment.run("-m", "schedlab", "policy", "new", "quick-first")
    assert done.returncode == 0, done.stderr
    root = environment.folder / "quick-first"
    environment.install(str(root))
    yield root
    shutil.rmtree(root)


def test_it_runs(environment, made):
    done = environment.run("-m", "schedlab", "run", *QUICK, "policy=quick_first", "hydra.run.dir=new")
    assert done.returncode == 0, done.stderr
    policy = json.loads((environment.folder / "new/manifest.json").read_text())["policy"]
    assert policy["class"] == "quick_first.QuickFirst" and list(policy["distribution"].values()) == ["0.1.0"]


def test_it_is_listed_with_its_origin_and_version(environment, made):
    done = environment.run("-m", "schedlab", "policy", "list")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["quick_first"] == ["quick_first.QuickFirst", "quick-first", "0.1.0"]
    assert rows["patience"] == ["patience.Patience", "patience", "1.2.3"]
    assert rows["fcfs"][:2] == ["schedlab.policies.fcfs.FCFS", "schedlab"]
    assert "shared/victims" not in rows


def test_it_passes_the_kit_as_written(environment, made):
    done = environment.run("-m", "schedlab", "policy", "check", "policy=quick_first", "check.seconds=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "QuickFirst: 10 pass, 4 bound" in done.stdout
    assert "other processes' hash seeds" in done.stdout


@pytest.mark.full
def test_its_own_test_passes(environment, made):
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(made / "tests"))
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_a_policy_that_is_installed_is_not_written_again(environment, made):
    done = environment.run("-m", "schedlab", "policy", "new", "quick-first", "--in", "elsewhere")
    assert done.returncode == 2 and "quick-first has a policy of this name" in done.stderr
    assert not (environment.folder / "elsewhere").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fcfs", "schedlab has a policy of this name"),
        ("Bad.Name", "expected a name of small letters"),
        ("class", "Python has this word for itself"),
        ("match", "Python has this word for itself"),
        ("null", "policy=null would be read as a value"),
        ("json", "standard library has a module of this name"),
        ("numpy", "a module of this name is installed"),
        ("typing-extensions", "a module of this name is installed"),
        ("pyyaml", "the project PyYAML is installed"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"policy new {name}: .*{says}"):
        new_package(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_complete(tmp_path):
    """No placeholder is left, the project is what the entry point says, and nothing is written twice."""
    written = new_package("my-own", tmp_path)
    assert all("{{" not in path.read_text() and "NAME" not in str(path) for path in written)
    project = tomllib.loads((tmp_path / "my-own/pyproject.toml").read_text())["project"]
    assert project["entry-points"]["schedlab.conf"] == {"my_own": "my_own.conf"}
    assert (tmp_path / "my-own/src/my_own/conf/policy/my_own.yaml").exists()
    with pytest.raises(ConfigError, match="exists already"):
        new_package("my-own", tmp_path)


@pytest.fixture(scope="module")
def router(environment):
    """`policy new --router to-the-quiet` in the user's folder, installed."""
    done = environment.run("-m", "schedlab", "policy", "new", "--router", "to-the-quiet")
    assert done.returncode == 0 and "schedlab run cluster=replicas router=to_the_quiet" in done.stdout, done.stderr
    root = environment.folder / "to-the-quiet"
    environment.install(str(root))
    yield root
    shutil.rmtree(root)


def test_a_new_router_runs_and_keeps_its_contract(environment, router):
    words = ("cluster=replicas", "cluster.replicas=2", "router=to_the_quiet", "router.kv_delay_s=1", "hydra.run.dir=r")
    done = environment.run("-m", "schedlab", "run", *QUICK, *words)
    assert done.returncode == 0, done.stderr
    told = json.loads((environment.folder / "r/manifest.json").read_text())["router"]
    assert told["class"] == "to_the_quiet.ToTheQuiet" and list(told["distribution"].values()) == ["0.1.0"]
    test = (router / "tests/test_to_the_quiet.py").read_text()
    done = environment.run("-c", f"{test}\ntest_it_keeps_the_contract()")
    assert done.returncode == 0, done.stderr


def test_names_of_routers_and_of_policies_are_apart(tmp_path):
    with pytest.raises(ConfigError, match="policy new least_requests: schedlab has a router of this name"):
        new_package("least_requests", tmp_path, "router")
    written = new_package("fcfs", tmp_path, "router")
    assert tmp_path / "fcfs/src/fcfs/conf/router/fcfs.yaml" in written
    assert all("{{" not in path.read_text() and "policy=" not in path.read_text() for path in written)


def test_the_policy_is_one_short_file(tmp_path):
    new_package("short", tmp_path)
    source = (tmp_path / "short/src/short/__init__.py").read_text()
    assert len(source.splitlines()) < 40
    compile(source, "short", "exec")
    assert "short" not in sys.modules
