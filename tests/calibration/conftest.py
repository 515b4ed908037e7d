"""A model small enough to run for real, a machine whose costs are planted, and the command line in this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

from schedlab.experiments import cli, engines
from schedlab.experiments.engines import EngineSetup
from schedlab.framework.batch import Batch
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Work
from schedlab.framework.executor import StepResult
from schedlab.framework.limits import EngineConfig
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.stub import StubExecutor

SMALL = {
    "architecture": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "vocab_size": 64,
    "max_position_embeddings": 2048, "dtype": "float32",
}  # fmt: skip
LIMITS = EngineConfig(num_blocks=1024, max_model_len=2048)


class PlantedExecutor(StubExecutor):
    """Takes as long as `coefficients` say, times the next of `factors`; remembers the work of each batch."""

    needs_inputs = False

    def __init__(self, coefficients: Coefficients, factors: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        self.coefficients = coefficients
        self.factors = factors
        self.works: list[Work] = []

    def execute(self, batch: Batch) -> StepResult:
        work = Work.of_batch(batch, self.block_bytes(self.block_size))
        self.works.append(work)
        return StepResult(round(self.coefficients.total_ns(work) * self.factors()))


def planted(executor: PlantedExecutor, config: EngineConfig = LIMITS) -> EngineSetup:
    return EngineSetup("planted", executor, config, ("virtual",))


@pytest.fixture(scope="session")
def shape() -> ModelConfig:
    return ModelConfig.from_mapping(SMALL)


@pytest.fixture(scope="session")
def cpu() -> Hardware:
    return engines.hardware_preset("cpu")


@pytest.fixture
def schedlab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line from an empty folder: exit code, what it printed, what it complained of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        logging.getLogger().handlers = []  # Hydra's write to the stream of an earlier call
        monkeypatch.setattr(sys, "argv", ["schedlab", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (int(end.value.code or 0), *capsys.readouterr())

    return call
