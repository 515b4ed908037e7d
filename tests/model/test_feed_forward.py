"""Experts against a loop over tokens, and faults that logits must show."""

import random
from dataclasses import replace

import pytest
import torch
from checkpoints import double, reference_logits, save
from paged import Pages
from torch.nn import functional as F

from schedlab.framework.errors import ConfigError
from schedlab.framework.model import decoder, feed_forward, layouts
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.hf import read_config
from schedlab.framework.model.layouts import Experts, Gated
from schedlab.framework.model.linear import plain
from schedlab.kernels.dispatch import kernels

SHAPE = ModelConfig(
    architecture="qwen3_moe", hidden_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4, intermediate_size=1, vocab_size=9, max_position_embeddings=9, num_experts=5, num_experts_per_tok=2,
    moe_intermediate_size=7,
)  # fmt: skip


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_rows_through_their_experts_one_by_one():
    weights = Experts(drawn(5, 12), None, tuple(Gated(drawn(14, 12) + e, drawn(12, 7) - e) for e in range(5)))
    ours = feed_forward.feed_forward(SHAPE, weights, kernels("cpu", "torch"), plain, plain)
    for tokens in (1, 2, 9):
        x_TH, expected = drawn(tokens, 12), []
        for x_H in x_TH:
            shares = F.softmax(weights.router_EH @ x_H, dim=0)
            best = sorted(range(5), key=lambda e: -shares[e])[:2]
            row = torch.zeros(12, dtype=torch.float64)
            for e in best:
                gate, up = (weights.experts[e].gate_up_2IH @ x_H).chunk(2)
                row += shares[e] / sum(shares[i] for i in best) * (weights.experts[e].down_HI @ (F.silu(gate) * up))
            expected.append(row)
        torch.testing.assert_close(ours(x_TH), torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_experts_that_nobody_chose_compute_nothing():
    """A decode of one token runs two of five."""
    ran = []

    def counting(weight_OK, bias_O):
        return lambda x_TK: ran.append(len(x_TK)) or plain(weight_OK, bias_O)(x_TK)

    weights = Experts(drawn(5, 12), None, tuple(Gated(drawn(14, 12), drawn(12, 7)) for _ in range(5)))
    feed_forward.feed_forward(SHAPE, weights, kernels("cpu", "torch"), counting, plain)(drawn(1, 12))
    assert ran == [1, 1, 1, 1], "two experts of two products each"


def test_experts_on_a_device_that_has_no_kernels_for_them():
    with pytest.raises(ConfigError, match=r"model\.num_experts: expected 0 on cuda .*, found 5"):
        ModelExecutor(SHAPE, device="cuda")


@pytest.mark.parametrize(
    "more",
    [{"shared_intermediate_size": 8}, {"num_dense_layers": 1}, {"kv_lora_rank": 8}],
    ids=lambda more: next(iter(more)),
)
def test_what_is_only_modelled_is_refused(more):
    (key, found), *_ = more.items()
    with pytest.raises(ConfigError, match=rf"model\.{key}: expected 0 on engines that compute, found {found}"):
        ModelExecutor(replace(SHAPE, **more))


# ---- faults ----


def another_order(patch):
    """Each token's rows come back in the order in which experts computed them."""
    patch.setattr(torch.Tensor, "argsort", lambda self, **_: torch.arange(len(self)))


def no_renormalisation(patch):
    started = feed_forward._Experts.__init__

    def init(self, *arguments):
        started(self, *arguments)
        self._renormalises = False

    patch.setattr(feed_forward._Experts, "__init__", init)


def gate_and_up_swapped(patch):
    made = layouts._gated

    def swapped(*arguments):
        gated = made(*arguments)
        gate, up = gated.gate_up_2IH.chunk(2)
        return Gated(torch.cat([up, gate]), gated.down_HI)

    patch.setattr(layouts, "_gated", swapped)


def no_sinks(patch):
    patch.setattr(torch, "sigmoid", lambda x: torch.ones_like(x) if x.shape[-1] == 6 else 1 / (1 + torch.exp(-x)))


def window_off_by_one(patch):
    windows = ModelConfig.windows.fget
    patch.setattr(ModelConfig, "windows", property(lambda self: tuple(w and w + 1 for w in windows(self))))


def one_rotation_for_all_layers(patch):
    patch.setattr(decoder, "_turns_locally", lambda config, window: False)


FAULTS = [
    ("qwen3-moe", another_order), ("qwen3-moe", no_renormalisation), ("mixtral", gate_and_up_swapped),
    ("gpt-oss", no_sinks), ("gpt-oss", window_off_by_one), ("gemma3", window_off_by_one),
    ("gemma3", one_rotation_for_all_layers), ("qwen3-layers", window_off_by_one),
]  # fmt: skip


def farthest(variant, folder):
    """Largest difference of the logits from the reference's, in float64."""
    tokens = random.Random(4).choices(range(3, 97), k=30)
    pages = Pages(ModelExecutor(read_config(folder), path=folder, dtype="float64"), num_blocks=64)
    ours = pages.logits((pages.add(tokens), 30))[0]
    return float((ours - reference_logits(double(variant), tokens)[-1]).abs().max())


@pytest.mark.parametrize(("variant", "fault"), FAULTS)
def test_a_fault_shows_in_the_logits(variant, fault, tmp_path, monkeypatch):
    folder = save(variant, tmp_path)
    assert farthest(variant, folder) < 1e-10
    with monkeypatch.context() as patch:
        fault(patch)
        assert farthest(variant, folder) > 1e-3
