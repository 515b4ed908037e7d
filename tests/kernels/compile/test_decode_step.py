"""The decode step that a graph captures, on tensors without data: it can ask the device nothing, and compiles once."""

from __future__ import annotations

import pytest
import torch
from harness import specialisations

from schedlab.framework.model.backend import Backend, by_rows, quantised_gpu
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.decoder import Decoder, RaggedBatch
from schedlab.framework.model.graphs import PaddedDecode, sizes_up_to
from schedlab.framework.model.layouts import Gated
from schedlab.framework.model.linear import plain
from schedlab.framework.model.weights import LayerWeights, Weights
from schedlab.kernels.dispatch import kernels

META = torch.device("meta")
LLAMA_8B = ModelConfig(
    architecture="llama", hidden_size=4096, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, intermediate_size=14336, vocab_size=128_256, max_position_embeddings=8192,
)  # fmt: skip


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def weights() -> Weights:
    layer = LayerWeights(meta(4096), meta(6144, 4096), None, None, None, meta(4096, 4096), meta(4096),
                         Gated(meta(28672, 4096), meta(4096, 14336)))  # fmt: skip
    return Weights(meta(128_256, 4096), (layer, layer), meta(4096), meta(128_256, 4096))


@pytest.mark.parametrize("linear", [plain, by_rows])
def test_every_size_runs_without_data_and_takes_the_same_kernels(linear) -> None:
    """A tensor on the meta device has no values: whatever looked at one would raise."""
    backend = Backend(kernels("cuda", "triton"), linear, RaggedBatch.of)
    decoder = Decoder(LLAMA_8B, weights(), backend.kernels, backend.linear)
    cache = meta(1000, 16, 8, 128)
    variants = []
    with torch.inference_mode(), specialisations() as found:
        for size in sizes_up_to(100):
            step = PaddedDecode(size, 512, decoder, backend.kernels, [(cache, cache)] * 2, META)
            step.step()
            with pytest.raises((RuntimeError, NotImplementedError)):
                step.drawn_N.tolist()
            variants.append({name: len(keys) for name, keys in found.items()})
    assert variants[0] == variants[-1], "a size compiles what another size has not"
    expected = {"rms_norm", "rope_kv_write", "split", "combine", "silu_mul", "sample"}
    assert {name.removesuffix("_kernel") for name in variants[0]} == expected


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_steps_take_the_kernels_of_their_class_of_rows(kind) -> None:
    """What the warm-up compiles, one step of each class, serves every size."""
    backend = quantised_gpu(kernels("cuda", "triton"), META, torch.bfloat16, kind)
    decoder = Decoder(LLAMA_8B, weights(), backend.kernels, backend.linear, head=backend.head)
    cache = meta(1000, 16, 8, 128)

    def step(size: int) -> None:
        PaddedDecode(size, 512, decoder, backend.kernels, [(cache, cache)] * 2, META).step()

    with torch.inference_mode(), specialisations() as found:
        for size in backend.row_classes:
            step(size)
        compiled = {name: set(keys) for name, keys in found.items()}
        assert len(compiled["product_kernel"]) == 4 and len(compiled["sum_kernel"]) == 1
        for size in sizes_up_to(200):
            step(size)
    assert found == compiled
