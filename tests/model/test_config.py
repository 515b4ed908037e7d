"""Shapes: the presets' published parameter counts, and what a config.json must and must not say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import SHAPE, VARIANTS, reference, save

from schedlab.framework.errors import ModelError
from schedlab.framework.model.config import ModelConfig, RopeScaling
from schedlab.framework.model.weights import random_weights, tensor_shapes

PRESETS = Path(__file__).parents[2] / "conf" / "model"
PUBLISHED = {  # parameters as on the model cards, a tied embedding counted once
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "llama3.2-1b": 1_235_814_400,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
}


def preset(name):
    keys = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    return ModelConfig.from_mapping({k: v for k, v in keys.items() if k not in ("path", "seed")})


def test_presets_have_the_published_sizes():
    assert {name: preset(name).num_parameters() for name in PUBLISHED} == PUBLISHED


def test_kv_bytes_per_token():
    assert preset("llama3.1-8b").kv_bytes_per_token() == 131_072  # 2 * 32 layers * 8 heads * 128 * 2 bytes
    assert preset("llama3.1-8b").kv_bytes_per_token("float8_e4m3fn") == 65_536
    assert preset("smollm2-135m").kv_bytes_per_token("float32") == 46_080


def test_shapes_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import schedlab.framework.model.config"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_says_its_shape(variant, tmp_path):
    config = ModelConfig.from_hf(save(variant, tmp_path))
    model = reference(variant)
    assert config.num_parameters() == model.num_parameters()
    assert dict(tensor_shapes(config)) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert config.sliding_window == model.config.to_dict().get("sliding_window")
    assert config.group_size == model.config.num_attention_heads // model.config.num_key_value_heads
    assert (config.rope_scaling is not None) == (variant == "llama3")
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1 and config.dtype == "float32"


def write(directory, **changes):
    hf = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **SHAPE, **changes}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in hf.items() if v != "absent"}))
    return directory


def test_older_config_files(tmp_path):
    """Rope keys at the top, `torch_dtype`, no head_dim, no key-value heads; stop tokens of generation_config too."""
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    write(
        tmp_path, rope_theta=5e5, rope_scaling={**scaling, "rope_type": "llama3"}, torch_dtype="bfloat16",
        num_key_value_heads="absent", head_dim="absent", pad_token_id="absent",
    )  # fmt: skip
    config = ModelConfig.from_hf(tmp_path)
    assert config.rope_theta == 5e5 and config.rope_scaling == RopeScaling(**scaling)
    assert config.dtype == "bfloat16" and config.eos_token_ids == (2, 7)
    assert config.num_key_value_heads == 6 and config.head_dim == 8
    assert not config.tie_word_embeddings and config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]},
         "architectures: expected one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
         "found GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu"),
        ({"attention_bias": True}, "attention_bias: expected False"),
        ({"mlp_bias": True}, "mlp_bias: expected False"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: expected None"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type: expected default or llama3, found yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor: expected a value, found none"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers: expected a value, found none"),
        ({"num_key_value_heads": 4}, "num_attention_heads: expected a multiple of num_key_value_heads = 4, found 6"),
        ({"vocab_size": 0}, "vocab_size: expected at least 1, found 0"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8,
          "max_window_layers": 1}, "max_window_layers: expected 0 or at least 3"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_in_one_line(changes, said, tmp_path):
    with pytest.raises(ModelError) as error:
        ModelConfig.from_hf(write(tmp_path, **changes))
    assert said in str(error.value) and "config.json" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_an_unreadable_config_file(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json: expected"):
        ModelConfig.from_hf(tmp_path)


def test_preset_keys_are_checked():
    keys = yaml.safe_load((PRESETS / "tiny.yaml").read_text())
    with pytest.raises(ModelError, match=r"model\.path: no such key; expected some of architecture"):
        ModelConfig.from_mapping(keys)
    with pytest.raises(ModelError, match="vocab_size"):
        ModelConfig.from_mapping({"architecture": "llama"})


def test_random_weights_follow_from_seed_and_name_alone():
    config = preset("tiny")
    one, same, other = (random_weights(config, seed, torch.float32) for seed in (0, 0, 1))
    assert torch.equal(one.layers[3].qkv_OH, same.layers[3].qkv_OH) and torch.equal(one.embed_VH, same.embed_VH)
    assert not torch.equal(one.layers[3].qkv_OH, other.layers[3].qkv_OH)
    assert not torch.equal(one.layers[3].qkv_OH, one.layers[2].qkv_OH)
