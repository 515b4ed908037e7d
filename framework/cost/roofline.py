"""FLOPs and bytes of each part of a step, and the time that a machine's ceilings leave for it.

A part's time is max(FLOPs / peak, bytes / bandwidth) (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009); parts
follow one another, so a step takes the sum. All figures are per device of a tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import numpy as np

from schedlab.framework.cost.hardware import Hardware, Route, Unit
from schedlab.framework.cost.routing import Routing
from schedlab.framework.cost.windows import Window, attention_reach, layers_window, seen, seen_at_most
from schedlab.framework.errors import ConfigError

if TYPE_CHECKING:
    from schedlab.framework.batch import Batch

BITS = {
    "fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.25, "int4": 4.5, "fp4": 4.5, "mxfp4": 4.25,
}  # fmt: skip
"""Bits an element of each dtype. int8 carries a 16-bit scale for each group of 64 weights, int4 also an offset, as the
engine's do; fp4 an 8-bit scale for each group of 16 (NVFP4), mxfp4 one for 32 (OCP Microscaling Formats 1.0, section
5.2); those of fp8 weigh nothing, one for a row or a tensor."""

NARROW_ARITHMETIC = ("fp8", "fp4")
"""Weight dtypes that are computed in, where the hardware can."""
KV_CACHE_DTYPES = ("fp32", "bf16", "fp16", "fp8")
KERNELS_PER_LAYER = 7
"""norm, qkv, rope with KV write, attention and its combine, out, norm."""
KERNELS_OF_FEED_FORWARD = 3
"""gate with up, silu·mul, down; of a shared expert too, and there it is added."""
KERNELS_OF_EXPERTS = 7
"""router, choice, sorting, gate with up of all experts, silu·mul, down of all experts, weighted sum."""
EXCHANGES = 2
"""Of a layer whose experts lie with other engines' too: tokens are sent to them, and what they computed back."""
KERNELS_PER_STEP = 4
"""embedding, last norm, logits, sampling."""


class ModelShape(Protocol):
    """What a cost needs to know of a Llama-family decoder; `ModelConfig` satisfies it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def shared_intermediate_size(self) -> int: ...
    @property
    def routing_skew(self) -> float: ...
    @property
    def expert_dtype(self) -> str | None: ...
    @property
    def num_dense_layers(self) -> int: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    def num_vector_parameters(self) -> int: ...
    def num_attention_weights(self, split: int = 1) -> int: ...
    def kv_elements(self, split: int = 1) -> int: ...


def nbytes(elements: int, dtype: str) -> int:
    """Bytes of `elements` in `dtype`, whole."""
    return round(elements * BITS[dtype] / 8)


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes, as sums over its grants; works add up.

    tokens          granted tokens: rows of the linears
    rows            grants that emit a token: rows of the logits
    decodes, prefills    numbers of grants of one token, which attend by the decode kernel, and of more
    prefill_pairs   (query, key) pairs of prefill attention; prefill_keys: keys it reads, each once
    decode_keys     keys that the decodes read: the sum of their contexts after the step
    copied_bytes    blocks that travel between device and host
    """

    tokens: int = 0
    rows: int = 0
    decodes: int = 0
    prefills: int = 0
    prefill_pairs: int = 0
    prefill_keys: int = 0
    decode_keys: int = 0
    copied_bytes: int = 0

    @classmethod
    def prefill(cls, start: int, count: int, emits: bool = True, window: Window = None) -> Work:
        """`count` tokens from position `start`; `emits` unless the chunk is an inner one. One token is a decode."""
        pairs, keys = attention_reach(start, count, window)
        if count == 1:
            return cls(tokens=1, rows=int(emits), decodes=1, decode_keys=pairs)
        return cls(tokens=count, rows=int(emits), prefills=1, prefill_pairs=pairs, prefill_keys=keys)

    @classmethod
    def decode(cls, context: int, window: Window = None) -> Work:
        """One token of a sequence that holds `context` tokens after the step."""
        return cls(tokens=1, rows=1, decodes=1, decode_keys=seen(context, window))

    @classmethod
    def of_batch(cls, batch: Batch, block_bytes: int, window: Window = None) -> Work:
        """The work of a batch before it is committed; `block_bytes` of one block."""
        parts = [
            cls.prefill(start, count, start + count == request.num_tokens, window)
            for request, start, count in batch.prefills
        ]
        decodes = len(batch.decodes)
        copied = (len(batch.copies_out) + len(batch.copies_in)) * block_bytes
        keys = batch.decode_context if window is None else windowed_context(batch, window)
        return cls.total(parts) + cls(decodes, decodes, decodes, 0, 0, 0, keys, copied)

    @classmethod
    def total(cls, works: Iterable[Work]) -> Work:
        return sum(works, start=cls())

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def windowed_context(batch: Batch, window: Window, ahead: int = 0) -> int:
    """Keys that the decodes of `batch`, `ahead` steps on, read under a sliding window, the query's own included."""
    contexts_N = np.array([request.num_computed_tokens + 1 + ahead for request in batch.decodes], np.int64)
    return int(seen_at_most(contexts_N, np.ones_like(contexts_N), window).sum())


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step on one device: FLOPs in the first of `arithmetic` that the device has, bytes on `route`.

    `devices` share the interconnect, where that is the route.
    """

    name: str
    flops: int
    bytes: int
    arithmetic: tuple[str, ...]
    unit: Unit = "linear"
    route: Route = "memory"
    devices: int = 1

    @property
    def intensity(self) -> float:
        """FLOP/byte; 0 for a part without bytes."""
        return self.flops / self.bytes if self.bytes else 0.0

    def compute_s(self, hardware: Hardware) -> float:
        return self.flops / hardware.flops(self.arithmetic, self.unit) if self.flops else 0.0

    def transfer_s(self, hardware: Hardware) -> float:
        return self.bytes / hardware.bandwidth(self.route, self.devices) if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model's parts under given dtypes and parallelism.

    Projections follow `weight_dtype`, experts the model's `expert_dtype` if it has one; embedding, head, norms and
    activations stay in 16 bits (32 with fp32 weights). fp8 and fp4 weights are computed in that dtype where the
    hardware can, all others in the activations' dtype. The `kv_cache_dtype` "auto" is the activations'. KV heads are
    split as far as they go and replicated beyond. Each device holds a slice of every expert, or, above an
    `expert_parallel` of 1, whole experts: that many devices share them, `tensor_parallel` of them this engine's and the
    rest those of engines like it with as many tokens in each step. ConfigError for an unknown dtype or a degree that
    does not divide the model.
    """

    model: ModelShape
    weight_dtype: str = "bf16"
    kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        if self.weight_dtype not in BITS:
            raise ConfigError(f"weight_dtype: expected one of {', '.join(BITS)}, found {self.weight_dtype}")
        if self.expert_dtype not in BITS:
            raise ConfigError(f"model.expert_dtype: expected one of {', '.join(BITS)}, found {self.expert_dtype}")
        if self.kv_cache_dtype == "auto":
            object.__setattr__(self, "kv_cache_dtype", self.activation_dtype)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            expected = ", ".join(("auto", *KV_CACHE_DTYPES))
            raise ConfigError(f"kv_cache_dtype: expected one of {expected}, found {self.kv_cache_dtype}")
        self._check_split()

    def _check_split(self) -> None:
        degree, model = self.tensor_parallel, self.model
        if degree < 1:
            raise ConfigError(f"tensor_parallel: expected at least 1, found {degree}")
        kv_heads = model.num_key_value_heads
        splits = kv_heads % degree == 0 or degree % kv_heads == 0
        widths = [self._sliced_width, model.shared_intermediate_size] if model.num_experts else []
        if not model.num_experts or model.num_dense_layers:
            widths.append(model.intermediate_size)
        if not splits or model.num_attention_heads % degree or any(width % degree for width in widths):
            raise ConfigError(
                f"tensor_parallel: {degree} does not divide {model.num_attention_heads} attention heads, {kv_heads} "
                f"key-value heads and an intermediate size of {widths[0]}"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        degree, experts = self.expert_parallel, self.model.num_experts
        if degree == 1:
            return
        if degree < 1 or degree % self.tensor_parallel or not experts or experts % degree:
            raise ConfigError(
                f"expert_parallel: expected 1, or a multiple of tensor_parallel ({self.tensor_parallel}) that divides "
                f"the model's {experts} experts, found {degree}"
            )

    @property
    def _sliced_width(self) -> int:
        """Of an expert: 0 where no expert is sliced."""
        return self.model.moe_intermediate_size if self.expert_parallel == 1 else 0

    @property
    def window(self) -> Window:
        """What the model's queries see."""
        return layers_window(self.model.windows)

    @property
    def expert_dtype(self) -> str:
        return self.model.expert_dtype or self.weight_dtype

    @property
    def activation_dtype(self) -> str:
        return self.weight_dtype if self.weight_dtype in ("fp32", "fp16") else "bf16"

    @property
    def q_size(self) -> int:
        return self.model.num_attention_heads // self.tensor_parallel * self.model.head_dim

    @property
    def kv_size(self) -> int:
        return max(self.model.num_key_value_heads // self.tensor_parallel, 1) * self.model.head_dim

    @property
    def mlp_size(self) -> int:
        """Width of what every token passes through: the feed-forward, or the shared expert."""
        model = self.model
        width = model.shared_intermediate_size if model.num_experts else model.intermediate_size
        return width // self.tensor_parallel

    @property
    def expert_size(self) -> int:
        return self.model.moe_intermediate_size // (self.tensor_parallel if self.expert_parallel == 1 else 1)

    @property
    def routed_size(self) -> int:
        """Width of all experts of one token, on one of the devices that share the token."""
        return self.model.num_experts_per_tok * self.model.moe_intermediate_size // self.tensor_parallel

    @property
    def routing(self) -> Routing:
        model, devices = self.model, self.expert_parallel
        sources = max(devices // self.tensor_parallel, 1)
        return Routing(model.num_experts, model.num_experts_per_tok, model.routing_skew, devices, sources)

    @property
    def exchanging_layers(self) -> int:
        """Layers that send tokens to experts on other engines' devices."""
        return self.sparse_layers if self.expert_parallel > self.tensor_parallel else 0

    @property
    def vocab_size(self) -> int:
        return -(-self.model.vocab_size // self.tensor_parallel)

    @property
    def layer_elements(self) -> int:
        """Weights of one layer's projections that every token passes through, a router's included."""
        passed = self.model.hidden_size * (3 * self.mlp_size + self.model.num_experts)
        return self.model.num_attention_weights(self.tensor_parallel) + passed

    @property
    def dense_elements(self) -> int:
        """What the feed-forwards of layers without experts have more than those of layers with, over all of them."""
        model = self.model
        more = 3 * (model.intermediate_size // self.tensor_parallel - self.mlp_size) - model.num_experts
        return model.num_dense_layers * model.hidden_size * more

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.model.num_hidden_layers - self.model.num_dense_layers if self.model.num_experts else 0

    @property
    def expert_elements(self) -> int:
        """Weights of one expert of one layer."""
        return 3 * self.model.hidden_size * self.expert_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers."""
        return self.model.num_hidden_layers * nbytes(self.model.kv_elements(self.tensor_parallel), self.kv_cache_dtype)

    def windowed_kv_bytes(self, context: int) -> int:
        """What a sequence of `context` tokens would keep if layers kept no more than they see."""
        layers = sum(seen(context, window) for window in self.model.windows)
        return layers * nbytes(self.model.kv_elements(self.tensor_parallel), self.kv_cache_dtype)

    @property
    def weight_bytes(self) -> int:
        """All weights: projections, biases, norms, embedding, and the head unless tied."""
        model, width = self.model, self.activation_dtype
        bias = self.q_size + 2 * self.kv_size if model.qkv_bias else 0
        held = model.num_experts // self.expert_parallel
        experts = nbytes(held * self.expert_elements, self.expert_dtype)
        matrices = nbytes(self.layer_elements, self.weight_dtype) * model.num_hidden_layers
        matrices += nbytes(self.dense_elements, self.weight_dtype) + experts * self.sparse_layers
        embeddings = self.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
        small = nbytes(
            model.num_hidden_layers * (model.num_vector_parameters() + bias) + model.hidden_size + embeddings, width
        )
        return matrices + small

    @property
    def kernels(self) -> int:
        """That a step starts."""
        shared = KERNELS_OF_FEED_FORWARD + 1 if self.model.shared_intermediate_size else 0
        sparse = self.sparse_layers * (KERNELS_OF_EXPERTS + shared)
        dense = (self.model.num_hidden_layers - self.sparse_layers) * KERNELS_OF_FEED_FORWARD
        return self.model.num_hidden_layers * KERNELS_PER_LAYER + sparse + dense + KERNELS_PER_STEP

    def activation_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Most that one step keeps besides weights and cache: the widest layer's tensors, and logits in fp32."""
        widest = 3 * (self.mlp_size + self.routed_size) + 2 * self.model.hidden_size
        return nbytes(max_num_batched_tokens * widest, self.activation_dtype) + max_num_seqs * self.model.vocab_size * 4

    def parts(self, work: Work) -> tuple[Part, ...]:
        """Parts of one step in order, those without FLOPs and bytes included. Copies come first, as they run."""
        return (
            self.copies(work), self.linears(work), self.experts(work), self.activations(work), self.kv_write(work),
            self.prefill_attention(work), self.decode_attention(work), self.logits(work), self.sampling(work),
            self.collectives(work), self.exchange(work),
        )  # fmt: skip

    def copies(self, work: Work) -> Part:
        return Part("block copies", 0, work.copied_bytes, (), route="host")

    def linears(self, work: Work) -> Part:
        """Projections: 2 FLOPs a weight and token; bytes are the weights, read once.

        Their inputs and outputs, which travel while the products run, are not counted.
        """
        elements = self.model.num_hidden_layers * self.layer_elements + self.dense_elements
        read = nbytes(elements, self.weight_dtype) if work.tokens else 0
        return Part("linears", 2 * work.tokens * elements, read, self._arithmetic(self.weight_dtype))

    def _arithmetic(self, weight_dtype: str) -> tuple[str, ...]:
        own = (weight_dtype,) if weight_dtype in NARROW_ARITHMETIC else ()
        return (*own, self.activation_dtype)

    def experts(self, work: Work) -> Part:
        """The chosen experts: FLOPs of each token's, bytes of those that any token is expected to choose.

        Whole experts are those of the busiest device.
        """
        layers, elements, routing = self.sparse_layers, self.expert_elements, self.routing
        chosen = work.tokens * (routing.busiest if self.expert_parallel > 1 else routing.chosen)
        read = nbytes(round(layers * routing.distinct(work.tokens) * elements), self.expert_dtype)
        return Part("experts", round(2 * chosen * layers * elements), read, self._arithmetic(self.expert_dtype))

    def activations(self, work: Work) -> Part:
        """The elementwise kernels between projections: two norms with residual, rope, silu·mul."""
        hidden, q, kv, mlp = self.model.hidden_size, self.q_size, self.kv_size, self.mlp_size + self.routed_size
        moved = 2 * 4 * hidden + 2 * (q + kv) + 3 * mlp
        flops = 2 * 5 * hidden + 3 * (q + kv) + 5 * mlp
        count = work.tokens * self.model.num_hidden_layers
        return Part("activations", count * flops, nbytes(count * moved, self.activation_dtype), ("fp32",))

    def prefill_attention(self, work: Work) -> Part:
        """Under latent attention by heads whose keys and values were made from what the cache holds."""
        model = self.model
        channels = 2 * self.q_size
        if model.kv_lora_rank:
            heads = model.num_attention_heads // self.tensor_parallel
            channels = heads * (model.head_dim + model.qk_rope_head_dim + model.v_head_dim)
        return self._attention("prefill attention", work.prefill_pairs, work.prefill_keys, channels)

    def decode_attention(self, work: Work) -> Part:
        """Under latent attention by heads that read what the cache holds itself (arXiv:2405.04434, section 2.1)."""
        model = self.model
        channels = 2 * self.q_size
        if model.kv_lora_rank:
            heads = model.num_attention_heads // self.tensor_parallel
            channels = heads * (2 * model.kv_lora_rank + model.qk_rope_head_dim)
        return self._attention("decode attention", work.decode_keys, work.decode_keys, channels)

    def _attention(self, name: str, pairs: int, keys: int, channels: int) -> Part:
        """Scores and values: 2 FLOPs a pair and channel of either; bytes are the keys and values read."""
        flops = 2 * channels * self.model.num_hidden_layers * pairs
        return Part(name, flops, keys * self.kv_bytes_per_token, (self.activation_dtype,), unit="attention")

    def kv_write(self, work: Work) -> Part:
        return Part("kv write", 0, work.tokens * self.kv_bytes_per_token, ("fp32",))

    def logits(self, work: Work) -> Part:
        """The head, for the rows that are due only."""
        elements = self.vocab_size * self.model.hidden_size
        read = nbytes(elements, self.activation_dtype) if work.rows else 0
        return Part("logits", 2 * work.rows * elements, read, (self.activation_dtype,))

    def sampling(self, work: Work) -> Part:
        """Logits written and read once in fp32; a maximum, an exponential and a sum for each."""
        elements = work.rows * self.vocab_size
        return Part("sampling", 3 * elements, nbytes(2 * elements, "fp32"), ("fp32",))

    def collectives(self, work: Work) -> Part:
        """Two all-reduces a layer in a ring, 2 (n - 1) / n of the message each, and one gather of the logits.

        A layer that exchanges tokens reduces once: scattered before the exchange, gathered after it.
        """
        others = self.tensor_parallel - 1
        reductions = 2 * self.model.num_hidden_layers - self.exchanging_layers
        reduced = 2 * reductions * work.tokens * self.model.hidden_size
        elements = (reduced + work.rows * self.model.vocab_size) * others // self.tensor_parallel
        moved = nbytes(elements, self.activation_dtype)
        return Part("collectives", 0, moved, (), route="interconnect", devices=self.tensor_parallel)

    def exchange(self, work: Work) -> Part:
        """Two all-to-alls a layer: each device sends its tokens' copies, one for each chosen expert elsewhere.

        Copies are in the activations' dtype both ways; an even choice leaves (n - 1) / n of them elsewhere.
        """
        copies = work.tokens * self.model.num_experts_per_tok * (self.expert_parallel - 1)
        elements = EXCHANGES * self.exchanging_layers * copies * self.model.hidden_size
        moved = nbytes(elements // (self.expert_parallel * self.tensor_parallel), self.activation_dtype)
        return Part("exchange", 0, moved, (), route="interconnect", devices=self.expert_parallel)
