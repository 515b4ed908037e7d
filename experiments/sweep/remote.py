"""A sweep's jobs on a Ray cluster, which need not share a file system with this machine.

Code goes there as one folder: schedlab, and what is behind every `_target_` that no distribution brings. Files that a
config names go through Ray's object store. A run directory comes back as a whole and is put in place in one go. A
process or node that is lost costs its jobs another attempt elsewhere. Configs are composed here.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import schedlab
from schedlab.experiments.run import compose
from schedlab.experiments.sweep import resume
from schedlab.experiments.sweep.jobs import Composer, Job, SweepTask, execute, prepare, set_up
from schedlab.experiments.sweep.pool import Outcome, WorkerLost
from schedlab.experiments.sweep.resume import files_in, identity_of, input_file, installed, own_files, targets_in
from schedlab.framework.errors import ConfigError
from schedlab.workloads.workload import EMBEDDED

FORWARDED = ("WANDB_", "SCHEDLAB_")
"""Beginnings of environment variables that configs and trackers read."""
LOG = "job.log"


@dataclass(frozen=True)
class Cluster:
    """`address` is a cluster's, as `ray start` prints it, or null for one on this machine for as long as it takes."""

    address: str | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    max_retries: int = 3
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parcel:
    """A job as it travels. `inputs` are references to files' contents, by the names that the config has for them."""

    task: Callable[[DictConfig], Any]
    job: Job
    config: DictConfig
    holder: DictConfig
    folder: str
    inputs: Mapping[str, Any]


def run_all(task: SweepTask, jobs: list[Job], cluster: Cluster) -> Iterator[tuple[int, Outcome]]:
    """Outcomes by the number of their job, as they come; what is done is not sent, if the sweep resumes."""
    composer = Composer(task.loader, task.master)
    plans: list[tuple[int, Job, Path]] = []
    for number, job in enumerate(jobs):
        config, holder = composer.compose(job.overrides)
        folder, done = destination(config, prepare(job, holder, task.sweep), Path(task.sweep))
        if folder in {other for _, _, other in plans}:
            folder = resume.beside(folder, identity_of(compose.resolve(config)))
        if done:
            print(f"{folder.name}: was finished")
            yield number, Outcome()
        else:
            plans.append((number, job, folder))
    if plans:
        yield from send(task, composer, plans, cluster)


def destination(config: DictConfig, own: Path, sweep: Path) -> tuple[Path, bool]:
    """Folder of a job, and whether it need not run."""
    if not config.get("resume"):
        return own, False
    identity = identity_of(compose.resolve(config))
    folder = resume.folder_for(identity, own, sweep)
    return folder, resume.is_done(folder, identity)


def send(
    task: SweepTask, composer: Composer, plans: list[tuple[int, Job, Path]], cluster: Cluster
) -> Iterator[tuple[int, Outcome]]:
    ray = required()
    configs = [compose.resolve(composer.compose(job.overrides)[0]) for _, job, _ in plans]
    with tempfile.TemporaryDirectory(prefix="schedlab-code-") as code, connected(cluster, Path(code), configs):
        remote = ray.remote(num_cpus=cluster.num_cpus, num_gpus=cluster.num_gpus, max_retries=cluster.max_retries)(work)
        sent, waiting = {name: ray.put(pack(path)) for name, path in travelling(configs)}, {}
        for (number, job, folder), resolved in zip(plans, configs, strict=True):
            config, holder = composer.compose(job.overrides)
            prepare(job, holder, task.sweep)
            inputs = {name: [sent[name]] for name, _ in travelling([resolved])}
            parcel = Parcel(task.task, job, config, holder, folder.name, inputs)
            waiting[remote.remote(parcel)] = number, folder
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            number, folder = waiting.pop(ready)
            yield number, received(ready, folder)


def received(reference: Any, folder: Path) -> Outcome:
    """Put a run in its place, and print what it printed."""
    import ray

    try:
        outcome, content = ray.get(reference)
    except ray.exceptions.RayError as error:
        return Outcome(error=WorkerLost(" ".join(str(error).split())[:200]))
    incoming = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(incoming, ignore_errors=True)
    unpack(content, incoming)
    if folder.exists():
        resume.start_over(folder)
        shutil.rmtree(folder)
    incoming.rename(folder)
    print((folder / LOG).read_text(encoding="utf-8"), end="")
    return outcome  # type: ignore[no-any-return]


def required() -> Any:
    """The package ray."""
    try:
        import ray
    except ImportError:
        raise ConfigError("hydra/launcher=ray: expected the package ray; pip install schedlab[ray]") from None
    return ray


@contextlib.contextmanager
def connected(cluster: Cluster, code: Path, configs: list[dict[str, Any]]) -> Iterator[None]:
    ray = required()
    stage(code, configs)
    kept = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    given = dict(cluster.runtime_env)
    variables = {**kept, "HYDRA_FULL_ERROR": "1", **given.pop("env_vars", {})}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address=cluster.address or "local",  # not one that Ray remembers from before
        runtime_env={"working_dir": str(code), "env_vars": variables, **given},
        logging_level="ERROR",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def stage(code: Path, configs: list[dict[str, Any]]) -> None:
    """Copy what must be importable elsewhere into one folder."""
    unneeded = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(schedlab.__file__).parent, code / "schedlab", ignore=unneeded)
    tops = {target.partition(".")[0] for config in configs for target in targets_in(config)} - {"schedlab"}
    for module in sorted(tops):
        if installed(module) is None:
            root, files = own_files(module)
            for file in files:
                copy = code / file.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)


def travelling(configs: list[dict[str, Any]]) -> list[tuple[str, Path]]:
    """Inputs that are not in the package."""
    found = {entry for config in configs for entry in files_in(config)}
    return sorted((name, path) for name, path in found if not name.startswith(EMBEDDED))


# ---- elsewhere ----


def work(parcel: Parcel) -> tuple[Outcome, bytes]:
    """Run a job in a folder of this process, with its inputs where the config says; its directory comes back."""
    import ray

    set_up()
    os.chdir(workplace())
    for name, (reference,) in parcel.inputs.items():
        provide(name, reference, ray.get)
    sweep = Path("runs").absolute()
    folder = prepare(parcel.job, parcel.holder, str(sweep), parcel.folder)
    shutil.rmtree(folder, ignore_errors=True)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            outcome = Outcome(execute(parcel.task, parcel.config, parcel.holder))
        except Exception as error:
            outcome = Outcome(error=RuntimeError(f"{type(error).__name__}: {error}"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG).write_text(said.getvalue(), encoding="utf-8")
    content = pack(folder)
    shutil.rmtree(folder)
    return outcome, content


_places: list[str] = []


def workplace() -> str:
    """One folder a process."""
    if not _places:
        _places.append(tempfile.mkdtemp(prefix="schedlab-"))
    return _places[0]


def provide(name: str, reference: Any, get: Callable[[Any], bytes]) -> None:
    """A file or folder where the config has it: below this folder, or at an absolute path, where it may be already."""
    path = Path(name).expanduser()
    if input_file(name) is not None:
        return
    try:
        incoming = path.with_name(f".{path.name}.{os.getpid()}.partial")
        unpack(get(reference), incoming)
        incoming.rename(path)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be put here ({error.strerror}); a relative path can") from None


def pack(path: Path) -> bytes:
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(path, arcname=".")
        return buffer.getvalue()


def unpack(content: bytes, path: Path) -> None:
    """A file or folder packed by `pack`, at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = archive.getmembers()
        if members[0].isdir():
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 brings it
            archive.extractall(path)
        else:
            taken = archive.extractfile(members[0])
            assert taken is not None
            path.write_bytes(taken.read())
