"""The jobs of a sweep without Hydra's whole composition for each of them.

Hydra composes a config once per set of chosen options; a job that differs in values alone is a copy of that, with
Hydra's own rules for values applied.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.hydra import Hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, env_override, setup_globals
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from schedlab.experiments.run.messages import show_warning
from schedlab.framework.results.writer import write_whole
from schedlab.workloads.workload import keep_traces

KEPT_TRACES = 2
"""Parsed, in each process: the jobs of a sweep share few files, and a large one takes gigabytes."""
Words = tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """Number within the sweep, and the words that make it differ."""

    number: int
    overrides: Words


class Composer:
    """Configs of the jobs of a sweep that starts from the config `master`."""

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        self._loader = loader
        self._master = master
        self._parser = OverridesParser.create(config_loader=loader)
        self._parsed: dict[str, Override] = {}
        self._bases: dict[Words, tuple[bytes, DictConfig]] = {}
        self._checked: set[tuple[Words, ...]] = set()

    def compose(self, overrides: Words) -> tuple[DictConfig, DictConfig]:
        """The task's config; and Hydra's, one for all jobs of the same options, with what this job was given."""
        options, values = self._split(overrides)
        base, holder = self._base(options)
        config = pickle.loads(base)
        try:
            ConfigLoaderImpl._apply_overrides_to_config(values, config)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException(str(error)) from error
        self._note_overrides(holder.hydra, overrides)
        root = copy.copy(config)  # for ${hydra.…} beside ${seed}; the task's own config has no hydra
        root._content["hydra"] = holder.hydra
        holder.hydra._set_parent(root)
        return config, holder

    def check(self, overrides: Words) -> DictConfig:
        """Compose once for all jobs that set the same keys of the same options; the config of one of them."""
        options, values = self._split(overrides)
        kinds = tuple((str(word.type), word.key_or_group, type(word.value()).__name__) for word in values)
        if (options, *kinds) not in self._checked:
            self.compose(overrides)
            self._checked.add((options, *kinds))
        config: DictConfig = pickle.loads(self._base(options)[0])
        return config

    def _base(self, options: Words) -> tuple[bytes, DictConfig]:
        """Pickled, for a copy is made four times as fast from that."""
        if options not in self._bases:
            whole = self._loader.load_sweep_config(self._master, list(options))
            holder = OmegaConf.masked_copy(whole, "hydra")
            with read_write(whole), open_dict(whole):
                del whole["hydra"]
            OmegaConf.set_readonly(holder.hydra, False)
            self._bases[options] = pickle.dumps(whole), holder
        return self._bases[options]

    def _note_overrides(self, hydra: DictConfig, overrides: Words) -> None:
        words = [self._parse(word) for word in overrides]
        given = [word for word in words if not word.is_hydra_override()]
        style = hydra.job.config.override_dirname
        with open_dict(hydra):
            hydra.overrides.task = [word.input_line for word in given]
            hydra.job.override_dirname = get_overrides_dirname(
                given, kv_sep=style.kv_sep, item_sep=style.item_sep, exclude_keys=style.exclude_keys
            )

    def _split(self, overrides: Words) -> tuple[Words, list[Override]]:
        """Words that choose options, for Hydra to compose, and those that set values."""
        parsed = {word: self._parse(word) for word in overrides}
        options = tuple(word for word, override in parsed.items() if not self._sets_a_value(override))
        return options, [override for word, override in parsed.items() if word not in options]

    def _parse(self, word: str) -> Override:
        if word not in self._parsed:
            self._parsed[word] = self._parser.parse_override(word)
        return self._parsed[word]

    def _sets_a_value(self, override: Override) -> bool:
        """A dotted key, or a key of the top level that is no group."""
        key = override.key_or_group
        if override.package is not None or "/" in key or override.is_hydra_override():
            return False
        return "." in key or (key in self._master and not OmegaConf.is_config(self._master._get_node(key)))


class CachedConfigLoader:
    """Hydra's loader for a sweep of many jobs: checks one job for all that set the same keys."""

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader = loader
        self._composers: dict[int, Composer] = {}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        key = id(master_config)
        if key not in self._composers:
            self._composers[key] = Composer(self.loader, master_config)
        return self._composers[key].check(tuple(sweep_overrides))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


@dataclass(frozen=True)
class SweepTask:
    """All that a process needs to run jobs of a sweep. Called there, it gives the function that runs one."""

    loader: ConfigLoader
    callbacks: Callbacks
    master: DictConfig
    sweep: str
    task: Callable[[DictConfig], Any]

    def __call__(self) -> Callable[[Job], Any]:
        set_up()
        Plugins.instance()
        GlobalHydra.instance().clear()
        GlobalHydra.instance().initialize(Hydra(task_name="schedlab", config_loader=self.loader))
        return partial(self.run, Composer(self.loader, self.master))

    def run(self, composer: Composer, job: Job) -> Any:
        config, holder = composer.compose(job.overrides)
        prepare(job, holder, self.sweep)
        self.callbacks.on_job_start(config=config, task_function=self.task)
        value = execute(self.task, config, holder)
        self.callbacks.on_job_end(config=config, job_return=job_return(job, value))
        return value


def set_up() -> None:
    """What a process needs that runs jobs only."""
    warnings.showwarning = show_warning
    os.environ["HYDRA_FULL_ERROR"] = "1"
    setup_globals()
    keep_traces(KEPT_TRACES)


def prepare(job: Job, holder: DictConfig, sweep: str, name: str | None = None) -> Path:
    """Note in Hydra's config which job this is; the folder it gets, which `name` may say instead of the config."""
    hydra = holder.hydra
    HydraConfig.instance().cfg = holder  # type: ignore[assignment]
    with open_dict(hydra):
        hydra.job.num = hydra.job.id = job.number
        hydra.sweep.dir = sweep
        hydra.runtime.output_dir = os.path.abspath(os.path.join(sweep, name or hydra.sweep.subdir))
    return Path(hydra.runtime.output_dir)


def execute(task: Callable[[DictConfig], Any], config: DictConfig, holder: DictConfig) -> Any:
    """What the task returns, after Hydra's own preparations: its config, folder and environment."""
    hydra = holder.hydra
    HydraConfig.instance().cfg = holder  # type: ignore[assignment]
    folder = Path(hydra.runtime.output_dir, hydra.output_subdir or "")
    folder.mkdir(parents=True, exist_ok=True)
    if hydra.output_subdir is not None:
        for name, node in (("config", config), ("hydra", holder), ("overrides", hydra.overrides.task)):
            write_whole(folder / f"{name}.yaml", yaml_of(node))
    with env_override(hydra.job.env_set):
        return task(config)


def yaml_of(node: Any) -> str:
    """`node` as it is, interpolations left. JSON is YAML, and is written fifty times as fast."""
    try:
        return json.dumps(OmegaConf.to_container(node), indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError):  # an infinity, an enumeration
        return OmegaConf.to_yaml(node)


def job_return(job: Job, value: Any, error: Exception | None = None) -> JobReturn:
    """What a launcher reports of a job."""
    done = JobReturn(overrides=list(job.overrides), working_dir=os.getcwd(), task_name="schedlab")
    done.status = JobStatus.COMPLETED if error is None else JobStatus.FAILED
    done.return_value = value if error is None else error
    return done
