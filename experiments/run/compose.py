"""The one place that touches Hydra: from words on the command line to a config, and from its errors to one line."""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString, Sweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from schedlab.experiments.run.checks import check_arguments
from schedlab.experiments.run.help import HELP, page
from schedlab.framework.errors import ConfigError, SchedlabError

CONFIG_MODULE = "schedlab.conf"
PAIR = re.compile(r"[~+]|[\w./@:]+=")
"""How a word begins that is no flag."""
EXTRAS = {
    "hydra/sweeper=optuna": ("hydra-optuna-sweeper", "schedlab[optuna]"),
    "hydra/launcher=joblib": ("hydra-joblib-launcher", "hydra-joblib-launcher"),
    "hydra/launcher=submitit_local": ("hydra-submitit-launcher", "schedlab[submitit]"),
    "hydra/launcher=submitit_slurm": ("hydra-submitit-launcher", "schedlab[submitit]"),
}
"""Options that packages bring which are not always there, with what to install."""
USER_ERRORS = (SchedlabError, HydraException, OmegaConfBaseException, YAMLError)
"""What a user can cause: one line and exit 2. Anything else is our fault or a policy's, and shows its traceback."""


def run_with_overrides(
    task: Callable[[DictConfig], Any], words: Sequence[str], command: str, config_name: str = "config"
) -> None:
    """Run `task` on the config that `words` compose (`key=value`, `-m`, `--cfg job`, `--info`, `--help`, …)."""
    if set(words) & set(HELP) and (told := page(command)) is not None:
        print(told)
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hands the exception to us instead of printing it
    sys.argv = [f"schedlab {command}", *flags_first(words, command)]
    failures: list[Exception] = []

    @functools.wraps(task)
    def job(config: DictConfig) -> Any:
        try:
            return task(config)
        except Exception as error:  # raised below instead: Hydra would print lines of its own first
            failures.append(error)

    try:
        hydra.main(config_path=f"pkg://{CONFIG_MODULE}", config_name=config_name, version_base="1.3")(job)()
        for error in failures:
            raise error
    except (*USER_ERRORS, ValueError, TypeError, AttributeError) as error:
        if not failures:
            refuse_other_than_options(words)
        if isinstance(error, USER_ERRORS) or not failures:  # what Hydra raises is about the words
            raise ConfigError(one_line(error)) from error
        raise


def flags_first(words: Sequence[str], command: str) -> list[str]:
    """`words` in the order that Hydra can read: it takes no flag after the first key=value."""
    pairs = [word for word in words if PAIR.match(word)]
    flags = [word for word in words if word not in pairs]
    _, unknown = get_args_parser().parse_known_args(flags)
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such option; schedlab {command} --help lists what there is")
    if "--cfg" in flags and {"-m", "--multirun"} & set(flags):
        raise ConfigError("--cfg shows the config of one job: leave out -m")
    return flags + pairs


def refuse_other_than_options(words: Sequence[str]) -> None:
    """ConfigError for a word that gives a config group neither an option nor keys: Hydra's own error names no key."""
    try:
        parsed = OverridesParser.create().parse_overrides([word for word in words if PAIR.match(word)])
    except OverrideParseException:
        return  # tells what it is
    for override in parsed:
        group, value = override.key_or_group, override.value()
        options = value.list if isinstance(value, ChoiceSweep) else [value]
        kinds = (str, QuotedString, type(None)) if override.is_delete() else (str, dict, QuotedString, Sweep, Glob)
        if (files(CONFIG_MODULE) / group).is_dir() and not all(isinstance(x, kinds) for x in options):
            raise ConfigError(f"{override.input_line}: expected the name of an option of {group}")


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The config that `overrides` give, without running anything; within a command, from that command's search path.

    ConfigError for a word that names nothing.
    """
    return composed(overrides)[0]


def composed(words: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """As `compose`, and the option that is chosen of each group."""
    try:
        whole = _compose("config", words, return_hydra_config=True)
    except (*USER_ERRORS, ValueError, TypeError, AttributeError) as error:
        refuse_other_than_options(words)
        raise ConfigError(one_line(error)) from error
    chosen = {str(group): str(option) for group, option in whole.hydra.runtime.choices.items()}
    with read_write(whole), open_dict(whole):
        del whole["hydra"]
    return whole, chosen


def _compose(name: str, overrides: Sequence[str] = (), **more: Any) -> DictConfig:
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(name, overrides=list(overrides), **more)
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        return hydra.compose(name, overrides=list(overrides), **more)


def preset(group: str, name: str, serving: str = "none") -> dict[str, Any]:
    """The resolved keys of one option of a config group; of hardware with the host constants of `serving`."""
    beside = [f"+serving={serving}"] if group == "hardware" else []
    try:
        config = _compose(f"{group}/{name}", beside)  # alone: the whole config takes ten times as long
    except MissingConfigException:
        config = compose([f"{group}={name}", *(word.lstrip("+") for word in beside)])  # says which options there are
    try:
        keys = OmegaConf.to_container(config[group], resolve=True)
    except USER_ERRORS as error:
        raise ConfigError(one_line(error)) from error
    assert isinstance(keys, dict)
    return {str(key): value for key, value in keys.items()}


def with_option(config: DictConfig, group: str, name: str) -> DictConfig:
    """`config` with another option of a group, as it comes, in place of the one it has."""
    try:
        option = _compose(f"{group}/{name}")
    except MissingConfigException:
        option = compose([f"{group}={name}"])  # says which options there are
    changed = OmegaConf.create({**config, group: None})
    changed[group] = option[group]
    return changed


@contextmanager
def blaming(key: str) -> Iterator[None]:
    """What goes wrong inside is the fault of `key`, whose value names what is composed and built there."""
    try:
        yield
    except USER_ERRORS as error:
        raise ConfigError(f"{key}: {one_line(error)}") from error


def resolve(config: DictConfig) -> dict[str, Any]:
    """Plain values, every interpolation done. ConfigError for a value that is still missing."""
    try:
        resolved = with_interpolations(OmegaConf.to_container(config, throw_on_missing=True), config)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no default: give {error.full_key}=…") from None
    assert isinstance(resolved, dict)
    return Resolved((str(key), value) for key, value in resolved.items())


class Resolved(dict[str, Any]):
    """Keys and their plain values. A key that is asked for and was taken out is the user's mistake."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(f"{key}: expected in the config, found nothing")


def with_interpolations(plain: Any, node: Any) -> Any:
    """`plain`, the content of `node`, with what OmegaConf makes of each interpolation in it. Most values are none, and
    OmegaConf's own `resolve=True`, which gives the same, looks at each of them again.
    """
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        if isinstance(value, str) and "${" in value:
            made = node[key]
            whole = OmegaConf.is_config(made)
            plain[key] = OmegaConf.to_container(made, resolve=True, throw_on_missing=True) if whole else made
        elif isinstance(value, dict | list):
            plain[key] = with_interpolations(value, node[key])
    return plain


def build(node: DictConfig | dict[str, Any], name: str) -> Any:
    """What `node._target_` names, made from its keys; a failure is one line that starts with `name`.

    `node` may be a part of a configuration or of what `resolve` made of one.
    """
    keys = {**node} if isinstance(node, dict) else resolve(node)
    target = keys.pop("_target_", None)
    if not isinstance(target, str):
        raise ConfigError(f"{name}: expected a mapping with _target_, the class to use; found {sorted(keys)}")
    check_arguments(name, keys, locate(target, name))
    try:
        if all(map(is_own, words_in({**keys, "_target_": target}))):
            return made({**keys, "_target_": target}, name)
        return hydra.utils.instantiate(node, _convert_="all")
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, SchedlabError):
            raise cause from None
        if isinstance(cause, ValueError) and str(cause).startswith(f"{name}."):
            raise ConfigError(str(cause)) from error
        raise ConfigError(f"{name} ({target}): {flat(cause)}") from error


def words_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Keys that mean something to Hydra, with their values, at every depth."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(key, str) and key[:1] == key[-1:] == "_":
            yield key, inner
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from words_in(inner)


def is_own(word: tuple[str, Any]) -> bool:
    """Whether a word of Hydra's asks for nothing but a part of schedlab. All else is Hydra's, with its rules on what a
    configuration may call."""
    key, value = word
    if key != "_target_":
        return key == "_partial_"
    try:
        return str(locate(value, key).__module__).partition(".")[0] == "schedlab"
    except (ConfigError, AttributeError):
        return False


def made(value: Any, name: str) -> Any:
    """What Hydra's `instantiate` gives for resolved values in which every word `is_own`. It takes 5 to 10 ms for each
    part, which in a sweep of short runs is as long as the runs."""
    if isinstance(value, list):
        return [made(inner, name) for inner in value]
    if not isinstance(value, dict):
        return value
    parts = {key: made(inner, f"{name}.{key}") for key, inner in value.items() if key not in ("_target_", "_partial_")}
    if "_target_" not in value:
        return parts
    target = locate(value["_target_"], name)
    return functools.partial(target, **parts) if value.get("_partial_") else target(**parts)


def locate(target: str, name: str) -> Any:
    """The class or function at the dotted path `target`."""
    module, _, attribute = target.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name}._target_={target}: {flat(error)}") from error


def build_optional(node: DictConfig | dict[str, Any] | None, name: str) -> Any:
    """None where the chosen option names no class."""
    return build(node, name) if node and "_target_" in node else None


def output_directory() -> Path:
    config = HydraConfig.get()
    if config.job.chdir:
        raise ConfigError("hydra.job.chdir: expected false: relative paths are those of the folder of the command")
    return Path(config.runtime.output_dir)


def job_number() -> int:
    """Within its sweep."""
    return int(HydraConfig.get().job.num)


def sweep_directory() -> Path | None:
    """The directory shared by the jobs of this sweep; None for a single run."""
    if not HydraConfig.initialized():
        return None
    config = HydraConfig.get()
    return Path(config.sweep.dir).resolve() if config.mode == RunMode.MULTIRUN else None


def choices(groups: Sequence[str]) -> dict[str, str]:
    """The option chosen for each group, as the user wrote it."""
    if not HydraConfig.initialized():
        return {}
    chosen = HydraConfig.get().runtime.choices
    if missing := [group for group in groups if group not in chosen]:
        raise ConfigError(f"{missing[0]}: expected one option, found none")
    return {group: str(chosen[group]) for group in groups}


def overrides() -> dict[str, str]:
    """What this job was given on the command line, by key."""
    if not HydraConfig.initialized():
        return {}
    pairs = (word.lstrip("+").partition("=") for word in HydraConfig.get().overrides.task)
    return {key: value for key, _, value in pairs}


# ---- errors ----


def root_cause(error: BaseException) -> BaseException:
    """The first of a chain of exceptions, or the first that was written for the user."""
    while not isinstance(error, SchedlabError) and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def flat(error: BaseException) -> str:
    """Message of any exception on one line, with its type where the message alone would not tell."""
    text = " ".join(str(error).split())
    if isinstance(error, OmegaConfBaseException):
        key = f"{error.full_key}: " if error.full_key else ""
        return key + str(error).splitlines()[0]
    if isinstance(error, (HydraException, SchedlabError)):
        return text
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark  # of the text alone where a string was parsed
        return f"{mark.name}: line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def one_line(error: BaseException) -> str:
    """What went wrong, and for a misspelt key or option what exists instead."""
    if isinstance(error, SchedlabError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if (package := EXTRAS.get(f"{group}={option}")) is not None:
            return f"{group}={option}: expected the package {package[0]}; pip install {package[1]}"
        return no_such(f"{group}={option}: no such option", option, error.options, group)
    cause = root_cause(error)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(cause.parent_node, DictConfig):
        keys = [key for key in map(str, cause.parent_node) if key != "hydra" and not key.startswith("_")]
        told = no_such(f"{cause.full_key}: no such key", str(cause.key), keys, parent_of(str(cause.full_key)))
        listed = "_target_" not in cause.parent_node or keys
        return told if listed else f"{told}; a knob of its class takes a plus: +{cause.full_key}=…"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {str(error).splitlines()[0]}{_hint_to_quote(str(error.override))}"
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        return f"{flat(error)} ({flat(cause)})"
    return flat(error)


def _hint_to_quote(word: str) -> str:
    """For a value with signs that Hydra reads as none."""
    key, _, value = word.partition("=")
    plain = value.isascii() and not set(value) & set("#;&!?<>|")
    return "" if plain or "'" in value else f"; quote the value, for the shell too: \"{key}='{value}'\""


def parent_of(key: str) -> str:
    return key.rpartition(".")[0] or "the config"


def no_such(what: str, word: str, existing: Sequence[str], owner: str) -> str:
    close = difflib.get_close_matches(word, existing, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{what}; {hint}{owner} has {', '.join(existing) or 'nothing'}"
