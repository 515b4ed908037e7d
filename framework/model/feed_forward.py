"""What follows attention in a layer: a gated product, or a router and the experts that it chooses for each token.

Shape letters: T tokens, H hidden, I intermediate, E experts, K experts of a token, R = T * K rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.layouts import Experts, FeedForward, Gated
from schedlab.framework.model.linear import Linear, MakeLinear
from schedlab.kernels.dispatch import Kernels

Gate = Callable[[Tensor], Tensor]
"""[T, 2I], gate first, to [T, I]."""
CLAMP, SHARPNESS = 7.0, 1.702
"""gpt-oss: the limit of both halves, and the gain of the sigmoid (openai/gpt-oss, swiglu)."""


def feed_forward(
    config: ModelConfig, weights: FeedForward, kernels: Kernels, linear: MakeLinear, router: MakeLinear
) -> Linear:
    """Rows [T, H] to rows [T, H]. `router` applies the router's matrix, in float32 at least."""
    gate = gate_of(config, kernels)
    if isinstance(weights, Gated):
        return _gated(weights, linear, gate)
    experts = [torch.zeros_like if expert is None else _gated(expert, linear, gate) for expert in weights.experts]
    return _Experts(config, weights, experts, router)


def gate_of(config: ModelConfig, kernels: Kernels) -> Gate:
    """How the model's activation lets its first half gate the second."""
    if config.activation == "silu":
        return kernels.silu_mul
    gate = {"gelu_tanh": _gelu_mul, "clamped_swiglu": _clamped_swiglu}[config.activation]
    return lambda gate_up_T2I: kernels.in_tiles(gate, gate_up_T2I)


def _gelu_mul(gate_up_T2I: Tensor) -> Tensor:
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _clamped_swiglu(gate_up_T2I: Tensor) -> Tensor:
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    gate = gate.clamp(max=CLAMP)
    return (up.clamp(-CLAMP, CLAMP) + 1) * gate * torch.sigmoid(SHARPNESS * gate)


def _gated(weights: Gated, linear: MakeLinear, gate: Gate) -> Linear:
    gate_up = linear(weights.gate_up_2IH, weights.gate_up_bias_2I)
    down = linear(weights.down_HI, weights.down_bias_H)
    return lambda x_TH: down(gate(gate_up(x_TH)))


class _Experts:
    """Rows sorted by expert, each expert's by one product, and summed in the order in which their token chose them.

    Shazeer et al., arXiv:1701.06538. A token's result does not depend on the others', and its sum has one order.
    """

    def __init__(self, config: ModelConfig, weights: Experts, experts: list[Linear], router: MakeLinear) -> None:
        self._chosen = config.num_experts_per_tok
        self._renormalises = config.norm_topk_prob
        self._experts = experts
        self._wide = torch.float64 if weights.router_EH.dtype == torch.float64 else torch.float32
        bias_E = None if weights.router_bias_E is None else weights.router_bias_E.to(self._wide)
        self._router = router(weights.router_EH.to(self._wide), bias_E)

    def route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, experts) [T, K], the likeliest first."""
        shares_TE = self._router(x_TH.to(self._wide)).softmax(-1)
        weights_TK, chosen_TK = shares_TE.topk(self._chosen, dim=-1)
        if self._renormalises:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK, chosen_TK

    def __call__(self, x_TH: Tensor) -> Tensor:
        weights_TK, chosen_TK = self.route(x_TH)
        chosen_R = chosen_TK.flatten()
        order_R = chosen_R.argsort(stable=True)
        sorted_RH = x_TH[order_R // self._chosen]
        counts_E = torch.bincount(chosen_R, minlength=len(self._experts)).tolist()
        parts = zip(self._experts, sorted_RH.split_with_sizes(counts_E), strict=True)
        done_RH = torch.cat([expert(rows) for expert, rows in parts if len(rows)])
        out_RH = torch.empty_like(done_RH)
        out_RH[order_R] = done_RH
        weighted_TKH = out_RH.view(*chosen_TK.shape, -1) * weights_TK[..., None].to(out_RH.dtype)
        return weighted_TKH.sum(1)
