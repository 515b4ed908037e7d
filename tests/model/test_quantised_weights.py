"""Integer weights for a GPU: how they are read, what room they need, what is warmed up, what cannot be asked for."""

from dataclasses import replace

import pytest
import torch
from test_config import preset

from schedlab.framework.errors import ConfigError
from schedlab.framework.model import executor as executor_module
from schedlab.framework.model.backend import Backend, backend_for
from schedlab.framework.model.decoder import RaggedBatch
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.linear import packed, plain, quantising
from schedlab.framework.model.weights import all_but_matrices_on, random_weights
from schedlab.kernels.dispatch import kernels
from schedlab.kernels.quantised import Quantised

META = torch.device("meta")
MATRICES = ("qkv_OH", "qkv_bias_O", "o_HO", "feed_forward")


def staged(linear=plain, **options):
    return Backend(
        kernels("cpu", "torch"), linear, RaggedBatch.of, activations=torch.float32, weights=torch.bfloat16, staged=True,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_all_goes_to_the_device_but_matrices(tied):
    """What is not there stays away; a tied head stays tied."""
    shape = replace(preset("tiny"), tie_word_embeddings=tied, qkv_bias=tied, qk_norm=tied)
    weights = random_weights(shape, 0, torch.bfloat16)
    moved = all_but_matrices_on(META, weights)
    assert {moved.embed_VH.device, moved.lm_head_VH.device, moved.norm_H.device} == {META}
    assert (moved.lm_head_VH is moved.embed_VH) == tied
    for before, after in zip(weights.layers, moved.layers, strict=True):
        for field in before.__dataclass_fields__:
            was, now = getattr(before, field), getattr(after, field)
            if field in MATRICES or was is None:
                assert now is was
            else:
                assert now.device == META


def test_matrices_are_quantised_where_they_will_lie():
    made = []
    make = quantising(lambda weight, bias: made.append((weight, bias)), "int4", META)
    make(torch.randn(4, 64), torch.randn(4))
    ((weight, bias),) = made
    assert isinstance(weight, Quantised) and weight.numbers_OK.device == bias.device == META


def test_the_device_needs_room_for_integers_and_the_host_for_the_rest(monkeypatch):
    rooms = {"cpu": 2**40, "meta": 2**30}
    monkeypatch.setattr(executor_module, "available_bytes", lambda device: rooms[device.type])
    options = {"dtype": "bfloat16", "device": "meta", "weight_dtype": "int4", "backend": staged()}
    with pytest.raises(ConfigError) as error:
        ModelExecutor(preset("llama3.1-8b"), **options)
    assert str(error.value) == "model: 8,030,261,248 parameters in int4 need 5.6 GiB, found 1.0 GiB available"
    rooms.update(cpu=2**30, meta=6 * 2**30)
    with pytest.raises(ConfigError) as error:
        ModelExecutor(preset("llama3.1-8b"), **options)
    assert str(error.value) == (
        "model: 8,030,261,248 parameters in bfloat16 need 15.0 GiB of the host's memory, to be taken to the device "
        "from there, found 1.0 GiB available"
    )


def test_warming_up_runs_every_class_of_rows():
    rows = []

    def watched(weight, bias):
        linear = packed(weight, bias)
        return lambda x: (rows.append(len(x)), linear(x))[1]

    backend = staged(watched, head=packed, row_classes=(16, 64, 128))
    executor = ModelExecutor(preset("tiny"), dtype="float32", weight_dtype="int8", backend=backend)
    executor.allocate(16, 16, 0, 4)
    executor.warm_up()
    assert set(rows) == {16, 64, 128}


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        ("float32", {"weight_dtype": "bf16"}, "expected null, int8 or int4 with dtype=float32 on cuda, found bf16"),
        ("float64", {"weight_dtype": "int4"}, "expected null with dtype=float64 on cuda, found int4"),
        ("bfloat16", {"weight_dtype": "int2"}, "expected null or one of bf16, int8, int4, found int2"),
        (
            "bfloat16",
            {"weight_dtype": "int8", "batch_invariant": True},
            "expected null in batch-invariant mode, found int8",
        ),
    ],
)
def test_what_a_gpu_refuses(dtype, options, message):
    with pytest.raises(ConfigError, match=f"^model.weight_dtype: {message}$"):
        backend_for(torch.device("cuda"), getattr(torch, dtype), **options)
