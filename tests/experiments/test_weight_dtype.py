"""`model.weight_dtype`: the type that weights are held in, on the real engine and on the virtual clock."""

import pytest

from schedlab.experiments import engines
from schedlab.experiments.analysis import bounds, step_work
from schedlab.experiments.run.compose import preset
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.errors import ConfigError


def model(weight_dtype):
    return {**preset("model", "tiny"), "weight_dtype": weight_dtype}


@pytest.mark.parametrize(("weight_dtype", "expected"), [(None, "fp16"), ("bf16", "bf16"), ("int4", "int4")])
def test_the_virtual_clock_follows_it(weight_dtype, expected):
    setup = engines.virtual(model(weight_dtype), "h100", weight_dtype="fp16")
    assert setup.executor.roofline.weight_dtype == expected


def test_the_cpu_engine_follows_it():
    by_type = {name: engines.cpu(model(name), kernels="torch", num_blocks=8) for name in (None, "int8")}
    types = {name: setup.executor._decoder._embed_VH.dtype for name, setup in by_type.items()}
    assert str(types[None]) == "torch.float32" and str(types["int8"]) == "torch.bfloat16"
    with pytest.raises(ConfigError, match=r"model\.weight_dtype: expected null or one of bf16, int8, int4, found fp4"):
        engines.cpu(model("fp4"), num_blocks=8)


@pytest.mark.parametrize("weight_dtype, expected", [(None, "bf16"), ("int8", "int8"), ("int4", "int4")])
def test_what_is_said_of_a_real_engine_follows_it(weight_dtype, expected):
    """Calibration, the diagnosis of a run, and what no schedule could beat: bounds of wider weights would be beaten."""
    line = engines.roofline_of(model(weight_dtype), "bfloat16")
    assert (line.weight_dtype, line.kv_cache_dtype) == (expected, "bf16")
    assert engines.roofline_of(model("int8"), "float32").kv_cache_dtype == "fp32"
    config = {
        "engine": {"_target_": "schedlab.experiments.engines.cuda", "dtype": "bfloat16"}, "model": model(weight_dtype),
        "hardware": preset("hardware", "h100"), "policy": {},
    }  # fmt: skip
    found, _ = step_work.machine_of({"config": config})
    assert (found.weight_dtype, found.kv_cache_dtype) == (expected, "bf16")
    assert bounds.datasheet(config) == Coefficients.from_roofline(line, bounds.lossless(config["hardware"]))
