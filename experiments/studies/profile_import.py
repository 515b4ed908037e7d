"""`schedlab profile import SOURCE`: a cost profile put together from published kernel times.

The profile is of the device alone; a run adds the host's time of `serving=`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab.experiments.engines import model_preset
from schedlab.experiments.studies.kernel_tables.aiconfigurator import AIConfigurator, find_root
from schedlab.experiments.studies.kernel_tables.kernels import Kernels, points
from schedlab.experiments.studies.kernel_tables.llmservingsim import LLMServingSim
from schedlab.experiments.studies.kernel_tables.vidur import Vidur
from schedlab.framework.cost.fit import Profile, fit_profile
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline
from schedlab.framework.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

SOURCES = ("aiconfigurator", "llmservingsim", "vidur")
KEYS = ("path", "backend", "version", "out")
GUIDE = f"""profile import: expected a source, one of {", ".join(SOURCES)}, as in:
schedlab profile import aiconfigurator model=llama3.1-8b hardware=h100 engine.tensor_parallel=1 backend=vllm"""


@dataclass(frozen=True)
class Options:
    """The keys of `profile import`."""

    path: str | None
    backend: str
    version: str | None
    out: str | None


def import_profile(words: Sequence[str]) -> None:
    """SOURCE [PATH] and overrides; `path=`, `backend=`, `version=` and `out=` are short for those of `import`."""
    from schedlab.experiments.run import compose

    plain = [word for word in words if "=" not in word and not word.startswith("-")]
    asks_help = {"--help", "-h", "--hydra-help"} & set(words)
    if not (plain or asks_help) or (plain and plain[0] not in SOURCES) or len(plain) > 2:
        raise ConfigError(f"{GUIDE}; found {' '.join(plain) or 'none'}")
    given = [f"import.{word}" if word.partition("=")[0] in KEYS else word for word in words if word not in plain]
    given += [f"import.path={plain[1]}"] if len(plain) == 2 else []

    def task(config: DictConfig) -> None:
        import_job(config, plain[0])

    compose.run_with_overrides(task, [*given, "engine=virtual"], "profile import")


def import_job(config: DictConfig, source: str) -> Path:
    """Read the tables, fit, show, and write the profile; its path."""
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.checks import check_arguments
    from schedlab.experiments.run.messages import short

    keys = compose.resolve(config["import"])
    check_arguments("import", keys, Options)
    options = Options(**keys)
    roofline, hardware = modelled(config)
    kernels = open_source(source, roofline, hardware, options.path, options.backend, options.version)
    profile = imported(kernels, roofline, hardware)
    path = Path(options.out) if options.out else compose.output_directory() / "profile.json"
    profile.save(path)
    show(profile, kernels, roofline, hardware)
    model = compose.choices(["model"]).get("model", "NAME")
    print(f"in {short(path)}; schedlab run engine=virtual serving=vllm model={model} hardware={hardware.name} "
          f"engine.weight_dtype={roofline.weight_dtype} engine.kv_cache_dtype={roofline.kv_cache_dtype} "
          f"engine.tensor_parallel={roofline.tensor_parallel} profile={short(path)}")  # fmt: skip
    return path


def modelled(config: DictConfig) -> tuple[Roofline, Hardware]:
    """The model in its dtypes and split, and the machine, of `engine=virtual`."""
    from schedlab.experiments.run import compose

    shape, extras = model_preset(compose.resolve(config.model))
    engine = config.engine
    dtype = extras.get("weight_dtype") or engine.weight_dtype
    roofline = Roofline(shape, dtype, engine.kv_cache_dtype, engine.tensor_parallel, engine.expert_parallel)
    return roofline, compose.build(config.hardware, "hardware")


def open_source(
    source: str,
    roofline: Roofline,
    hardware: Hardware,
    path: str | None,
    backend: str = "vllm",
    version: str | None = None,
) -> Kernels:
    """The kernels of a source for one model on one machine. ConfigError for what it does not have."""
    _check_model(source, roofline)
    if source == "aiconfigurator":
        return AIConfigurator(find_root(path), roofline, hardware, backend, version)
    if path is None:
        command = f"profile import {source}"
        raise ConfigError(f"{command}: expected the path of its tables, as in: {command} PATH")
    return (LLMServingSim if source == "llmservingsim" else Vidur)(path, roofline, hardware)


def _check_model(source: str, roofline: Roofline) -> None:
    """Experts and windows are in one source alone; latent attention and layers of two kinds in none that is read."""
    model = roofline.model
    if model.kv_lora_rank or model.num_dense_layers:
        found = "latent attention" if model.kv_lora_rank else f"{model.num_dense_layers} layers without experts"
        raise ConfigError(
            f"profile import: expected keys and values of their own and layers of one kind, found {found}"
        )
    if roofline.exchanging_layers:
        raise ConfigError(
            f"profile import: expected engine.expert_parallel of 1 or of engine.tensor_parallel "
            f"({roofline.tensor_parallel}), for no source has all-to-alls, found {roofline.expert_parallel}"
        )
    if source != "aiconfigurator" and (model.num_experts or any(window is not None for window in model.windows)):
        found = f"{model.num_experts} experts" if model.num_experts else "a sliding window"
        raise ConfigError(f"profile import {source}: expected a dense model without windows, found {found}")


def imported(kernels: Kernels, roofline: Roofline, hardware: Hardware) -> Profile:
    """The profile that fits the steps that the kernels add up to; `imported` in its identity says from where."""
    profile = fit_profile(points(kernels, roofline), roofline, hardware)
    facts: dict[str, Any] = {**kernels.facts, "dropped_rows": kernels.dropped}
    return replace(profile, identity={**profile.identity, "imported": facts}, measured_host=False)


def show(profile: Profile, kernels: Kernels, roofline: Roofline, hardware: Hardware) -> None:
    facts, error = kernels.facts, profile.error
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    if kernels.dropped:
        print(f"{kernels.dropped} rows left out: faster than the peak of {hardware.name}")
    print(f"{error.num_works} steps; held-out error {error.held_out_mean:.1%} mean, {error.held_out_p90:.1%} p90")
    reached = profile.achieved(roofline)
    print("reached: " + ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in reached.items()))
