"""Presets as a user gets them, and a way to make batches without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from schedlab.framework.batch import Batch, Prefill
from schedlab.framework.content import TokenContent
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.request import EngineRequest


def _preset(group: str, name: str) -> dict[str, Any]:
    with initialize_config_module("schedlab.conf", version_base="1.3"):
        config = compose(overrides=[f"+{group}={name}", "+serving=none"])
    keys = OmegaConf.to_container(config[group], resolve=True)
    assert isinstance(keys, dict)
    return {str(key): value for key, value in keys.items() if key != "_target_"}


@pytest.fixture(scope="session")
def hardware() -> Callable[[str], Hardware]:
    return lambda name: Hardware(**_preset("hardware", name))


@pytest.fixture(scope="session")
def model() -> Callable[[str], ModelConfig]:
    def load(name: str) -> ModelConfig:
        keys = _preset("model", name)
        return ModelConfig.from_mapping({key: value for key, value in keys.items() if key not in ("path", "seed")})

    return load


@pytest.fixture(scope="session")
def h100(hardware: Callable[[str], Hardware]) -> Hardware:
    return hardware("h100")


@pytest.fixture(scope="session")
def llama(model: Callable[[str], ModelConfig]) -> ModelConfig:
    return model("llama3.1-8b")


@pytest.fixture(scope="session")
def smollm(model: Callable[[str], ModelConfig]) -> ModelConfig:
    return model("smollm2-135m")


def _request(num_tokens: int, computed: int) -> EngineRequest:
    request = EngineRequest("r", 0, num_tokens, TokenContent([]))
    request._base_computed = computed
    return request


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """A batch of `prefills` (start, count, prompt) and of decodes with the given contexts after the step."""

    def make(prefills: Sequence[tuple[int, int, int]] = (), contexts: Sequence[int] = (), copies: int = 0) -> Batch:
        return Batch(
            prefills=[Prefill(_request(prompt, start), start, count) for start, count, prompt in prefills],
            decodes=[_request(context, context - 1) for context in contexts],
            prefill_tokens=sum(count for _, count, _ in prefills),
            decode_context=sum(contexts),
            copies_out=[(i, i) for i in range(copies)],
        )

    return make
