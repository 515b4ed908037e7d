"""Shapes: the presets' published parameter counts, and what a config.json must and must not say."""

import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from checkpoints import SHAPE, VARIANTS, reference, save
from huggingface_hub.errors import StrictDataclassFieldValidationError
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import safe_open

from schedlab.framework.errors import ModelError
from schedlab.framework.model.config import SCALINGS, ModelConfig, RopeScaling
from schedlab.framework.model.hf import FAMILIES, read_config
from schedlab.framework.model.rope import rope_tables
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
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "granite-3.1-3b-a800m": 3_298_793_472,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-3-27b": 27_009_346_304,  # of text
}
ACTIVE = {
    "mixtral-8x7b": 12.9e9,
    "qwen3-30b-a3b": 3.3e9,
    "qwen3-235b-a22b": 22.2e9,
    "olmoe-1b-7b": 1.3e9,
    "gpt-oss-20b": 3.6e9,
    "gpt-oss-120b": 5.1e9,
}


def preset(name):
    keys = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    return ModelConfig.from_mapping({k: v for k, v in keys.items() if k not in ("path", "seed")})


def test_presets_have_the_published_sizes():
    assert {name: preset(name).num_parameters() for name in PUBLISHED} == PUBLISHED


def test_a_token_passes_through_the_published_number_of_parameters():
    """Cards round, and some leave the embedding out (gpt-oss: 0.58 billion of it)."""
    for name, published in ACTIVE.items():
        shape = preset(name)
        embedding = shape.vocab_size * shape.hidden_size if name.startswith("gpt-oss") else 0
        assert shape.num_parameters(active=True) - embedding == pytest.approx(published, rel=0.02)
    assert preset("llama3.1-8b").num_parameters(active=True) == PUBLISHED["llama3.1-8b"]


def test_kv_bytes_per_token():
    assert preset("llama3.1-8b").kv_bytes_per_token() == 131_072  # 2 * 32 layers * 8 heads * 128 * 2 bytes
    assert preset("llama3.1-8b").kv_bytes_per_token("float8_e4m3fn") == 65_536
    assert preset("smollm2-135m").kv_bytes_per_token("float32") == 46_080


def test_shapes_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import schedlab.framework.model.config"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_says_its_shape(variant, tmp_path):
    config = read_config(save(variant, tmp_path))
    model = reference(variant)
    assert config.num_parameters() == model.num_parameters()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert dict(tensor_shapes(config)) == {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert config.windows == windows(model.config)
    assert config.group_size == model.config.num_attention_heads // model.config.num_key_value_heads
    rope = model.config.rope_parameters or {}
    kind = rope.get("full_attention", rope).get("rope_type", "default")
    assert type(config.rope_scaling) is (None.__class__ if kind == "default" else SCALINGS[kind])
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
    config = read_config(tmp_path)
    assert config.rope_theta == 5e5 and config.rope_scaling == RopeScaling(**scaling)
    assert config.dtype == "bfloat16" and config.eos_token_ids == (2, 7)
    assert config.num_key_value_heads == 6 and config.head_dim == 8
    assert not config.tie_word_embeddings and config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]},
         f"architectures: expected one of {', '.join(FAMILIES)}, found GPT2LMHeadModel"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}, "mlp_only_layers: expected []"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2}, "decoder_sparse_step: expected 1"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv: expected None"),
        ({"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}},
         "quantization_config: expected None (nothing else is supported), found mxfp4"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 10.0}, "swiglu_limit: expected 7.0"),
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}, "final_logit_softcapping: expec"),
        ({"architectures": ["Gemma3ForCausalLM"],
          "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
         "rope_parameters.sliding_attention.rope_type: expected default, found linear"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
         "num_experts_per_tok: expected 1 to num_experts = 8, found 9"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "found DeepseekV3ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu"),
        ({"attention_bias": True}, "attention_bias: expected False"),
        ({"mlp_bias": True}, "mlp_bias: expected False"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: expected None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}},
         "rope_type: expected default, linear, llama3 or yarn, found dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "factor: expected a value, found none"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: expected 1.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor: expected a value, found none"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers: expected a value, found none"),
        ({"num_key_value_heads": 4}, "num_attention_heads: expected a multiple of num_key_value_heads = 4, found 6"),
        ({"vocab_size": 0}, "vocab_size: expected at least 1, found 0"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 4}, "layer_types: expected none in a llama"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]},
         "layer_types: expected one for each of 3 layers, found 1"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["chunked_attention"] * 3},
         "layer_types: expected each one of full_attention, sliding_attention, found chunked_attention"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_in_one_line(changes, said, tmp_path):
    with pytest.raises(ModelError) as error:
        read_config(write(tmp_path, **changes))
    assert said in str(error.value) and "config.json" in str(error.value) and "\n" not in str(error.value)


def windows(theirs):
    """Of each layer, as transformers' own model has them."""
    if theirs.model_type in ("llama", "olmoe", "granitemoe"):
        return (None,) * theirs.num_hidden_layers
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:
        return (getattr(theirs, "sliding_window", None),) * theirs.num_hidden_layers
    return tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)


ROPES = (
    {}, {"rope_theta": 5e5}, {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0,
                      "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}, "rope_theta": 1e6},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.5, "attention_factor": 1.25, "beta_slow": 2.0}},
)  # fmt: skip
OPTIONAL = {
    "num_key_value_heads": (1, 2, 3, 6, None), "head_dim": (16, 24), "rms_norm_eps": (1e-5,),
    "tie_word_embeddings": (True, False), "sliding_window": (7, 4096, None), "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 3, 40), "bos_token_id": (5, None), "eos_token_id": (6, [6, 9], None),
    "layer_types": (["sliding_attention", "full_attention", "sliding_attention"], ["full_attention"] * 3),
}  # fmt: skip
SHAPED = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 128,
}  # fmt: skip


@given(family=st.sampled_from(sorted(FAMILIES)), rope=st.sampled_from(ROPES), data=st.data())
def test_absent_keys_mean_what_transformers_takes_them_for(family, rope, data):
    """Random keys, some absent and some null, through transformers' configuration class and through ours."""
    chosen = {name: data.draw(st.sampled_from(values)) for name, values in OPTIONAL.items() if data.draw(st.booleans())}
    if not family.startswith(("Qwen2", "Qwen3For", "Gpt", "Gemma")):
        chosen.pop("layer_types", None)  # refused
    if family.startswith("Gemma"):
        assume("rope_parameters" not in rope)  # they have one of each kind of layer
        assume("type" not in rope.get("rope_scaling", {}))  # of which transformers takes no notice there
    said = {"architectures": [family], **SHAPED, **chosen, **copy.deepcopy(rope)}
    try:
        name = family.replace("ForCausalLM", "TextConfig" if family.startswith("Gemma") else "Config")
        theirs = getattr(transformers, name)(**copy.deepcopy(said))
        tables = modeling_rope(family)(theirs)
    except (ValueError, TypeError, StrictDataclassFieldValidationError):
        assume(False)  # they refuse it too
    heads = theirs.num_key_value_heads
    if theirs.num_attention_heads % heads:
        assume(False)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(said))
        ours = read_config(folder)
    assert ours.num_key_value_heads == heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.rms_norm_eps, ours.tie_word_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.windows == windows(theirs)
    assert ours.rope_theta == theirs.rope_parameters.get("full_attention", theirs.rope_parameters)["rope_theta"]
    if ours.num_experts:
        count = getattr(theirs, "num_local_experts", None) or theirs.num_experts
        assert ours.num_experts == count and ours.num_experts_per_tok == theirs.num_experts_per_tok
        assert ours.moe_intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert ours.norm_topk_prob == getattr(theirs, "norm_topk_prob", True)
    stops = theirs.eos_token_id
    assert ours.eos_token_ids == (tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,))
    assert ours.bos_token_id == theirs.bos_token_id
    positions = torch.arange(128)[None]
    for kind in set(theirs.layer_types) if family.startswith("Gemma") else [None]:
        mine = rope_tables(ours, 128, local=kind == "sliding_attention")
        their = tables(torch.zeros(1), positions, *([kind] if kind else []))
        for one, other in zip(mine, their, strict=True):
            torch.testing.assert_close(one, other[0, :, : ours.head_dim // 2], rtol=0, atol=2e-5)


def modeling_rope(family):
    """The class of a family's rotary embedding."""
    module = sys.modules[getattr(transformers, family).__module__]
    return getattr(module, family.replace("ForCausalLM", "RotaryEmbedding"))


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_an_unreadable_config_file(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json: expected"):
        read_config(tmp_path)


def test_preset_keys_are_checked():
    keys = yaml.safe_load((PRESETS / "tiny.yaml").read_text())
    with pytest.raises(ModelError, match=r"model\.path: no such key; expected some of .*architecture"):
        ModelConfig.from_mapping(keys)
    with pytest.raises(ModelError, match="vocab_size"):
        ModelConfig.from_mapping({"architecture": "llama"})


def test_random_weights_without_a_device_have_shapes_and_no_values():
    config = preset("tiny")
    real, none = (random_weights(config, 0, torch.float16, torch.device(name)) for name in ("cpu", "meta"))
    assert none.embed_VH.is_meta and none.embed_VH.shape == real.embed_VH.shape
    assert none.layers[0].qkv_OH.shape == real.layers[0].qkv_OH.shape and none.layers[0].qkv_OH.dtype == torch.float16


def test_random_weights_follow_from_seed_and_name_alone():
    config = preset("tiny")
    one, same, other = (random_weights(config, seed, torch.float32) for seed in (0, 0, 1))
    assert torch.equal(one.layers[3].qkv_OH, same.layers[3].qkv_OH) and torch.equal(one.embed_VH, same.embed_VH)
    assert not torch.equal(one.layers[3].qkv_OH, other.layers[3].qkv_OH)
    assert not torch.equal(one.layers[3].qkv_OH, one.layers[2].qkv_OH)
