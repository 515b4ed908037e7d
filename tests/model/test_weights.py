"""Broken checkpoints: each fault is one line that names the file or the tensor."""

import json

import pytest
import torch
from checkpoints import save
from safetensors.torch import load_file, save_file

from schedlab.framework.errors import ModelError
from schedlab.framework.model.hf import read_config
from schedlab.framework.model.weights import load_weights


def load(directory):
    return load_weights(read_config(directory), directory, torch.float32)


def rewrite(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def refusal(directory):
    with pytest.raises(ModelError) as error:
        load(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_tensor(tmp_path):
    said = refusal(rewrite(save("llama", tmp_path), lambda t: t.pop("model.layers.1.mlp.up_proj.weight")))
    assert "tensor model.layers.1.mlp.up_proj.weight: expected shape [80, 48], found no such tensor" in said


def test_wrong_shape(tmp_path):
    def cut(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:40].clone()

    assert "tensor model.norm.weight: expected shape [48], found [40]" in refusal(rewrite(save("llama", tmp_path), cut))


def test_leftovers(tmp_path):
    said = refusal(
        rewrite(save("llama", tmp_path), lambda t: t.update({f"extra.{i}": torch.ones(1) for i in range(5)}))
    )
    assert "found also extra.0, extra.1, extra.2 and 2 more" in said
    assert "self_attn.k_proj.bias" in refusal(_pretend(save("qwen2", tmp_path / "q"), "LlamaForCausalLM"))


def _pretend(directory, architecture):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [architecture]}))
    return directory


def test_a_tied_head_may_be_stored_twice_but_not_differ(tmp_path):
    save("llama-tied", tmp_path)
    twice = rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(load(twice).lm_head_VH, load(twice).embed_VH)
    rewrite(tmp_path, lambda t: t["lm_head.weight"].mul_(2))
    assert "tensor lm_head.weight: expected model.embed_tokens.weight (tied), found other values" in refusal(tmp_path)


def test_derived_rope_tables_are_no_leftovers(tmp_path):
    load(
        rewrite(
            save("llama", tmp_path), lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
        )
    )


def test_integer_weights(tmp_path):
    def quantise(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    said = refusal(rewrite(save("llama", tmp_path), quantise))
    assert "tensor model.norm.weight: expected bf16, fp16 or fp32, found torch.int8" in said


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file(keep, tmp_path):
    path = save("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path}: expected a whole safetensors file, found: " in refusal(tmp_path)


def test_corrupt_header(tmp_path):
    path = save("llama", tmp_path) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[:40] = b"\xff" * 40
    path.write_bytes(content)
    assert f"{path}: expected a whole safetensors file, found: " in refusal(tmp_path)


def test_missing_files(tmp_path):
    save("llama", tmp_path, max_shard_size="20KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    expected = f"{shard}: expected a whole safetensors file, found: No such file or directory"
    assert refusal(tmp_path) == expected  # the path once
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "weight_map: expected tensor names and their files, found None" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert f"{tmp_path}: expected *.safetensors files, found none" in refusal(tmp_path)
