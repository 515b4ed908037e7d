"""What is compiled, and what the code of each kernel has to show.

Necessary, not sufficient, for speed: no spills, tensor cores, wide asynchronous copies, more than one step of keys in
flight. That wrappers run on tensors without data also shows that they never look at a value on the device.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import launches
import pytest
import torch
from harness import CodeFacts, compiling_for, cuda_facts
from launches import FP8, attention

from schedlab.kernels import configs
from schedlab.kernels.quantised import KINDS

SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
REGISTERS_MAY_DIFFER_BY = 0.15
ATTENTION = ("prefill_kernel", "split_kernel")
PRODUCT = "product_kernel"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

TABLE = {
    f"{phase} {size} {name}": partial(attention, phase, size, dtype)
    for phase in ("prefill", "decode")
    for name, dtype in DTYPES.items()
    for size in configs.head_sizes(dtype)
}
VARIANTS = {
    "prefill 80 bf16": partial(attention, "prefill", 80),
    "prefill 128 bf16 window": partial(attention, "prefill", window=4096),
    "prefill 128 bf16 softcap lse": partial(attention, "prefill", softcap=30.0, return_lse=True),
    "prefill 128 bf16 fp8 cache": partial(attention, "prefill", cache_dtype=FP8, k_scale=2.0, v_scale=2.0),
    "decode 128 bf16 window": partial(attention, "decode", window=4096),
    "decode 128 bf16 fp8 cache": partial(attention, "decode", cache_dtype=FP8, k_scale=2.0, v_scale=2.0),
    "decode 128 bf16 group 24": partial(attention, "decode", heads=24, kv_heads=1),
    "head norm": launches.head_norm,
    "rope fp8 cache": partial(launches.rope, cache_dtype=FP8, scale=2.0),
}
POINTWISE = {
    "norm": launches.norm,
    "activation": launches.activation,
    "rope": launches.rope,
    "sampling": launches.sampling,
}
ROWS = {"few": 8, "some": 40, "many": 300}
PRODUCTS = {f"{kind} {rows} rows": partial(launches.product, kind, n) for kind in KINDS for rows, n in ROWS.items()}
PRODUCT_VARIANTS = {
    "int4 few rows fp32": partial(launches.product, "int4", 8, torch.float32),
    "int4 few rows group 8": partial(launches.product, "int4", 8, group=8),
    "int8 few rows fp32": partial(launches.product, "int8", 8, torch.float32),
    "int8 few rows 576": partial(launches.product, "int8", 8, columns=576, depth=576),
    "int4 few rows 576": partial(launches.product, "int4", 8, columns=576, depth=576),
    "int4 many rows fp16": partial(launches.product, "int4", 300, torch.float16),
}
ENTRIES = {
    "sm_80": TABLE | POINTWISE | PRODUCTS,
    "sm_90": TABLE | POINTWISE | VARIANTS | PRODUCTS | PRODUCT_VARIANTS,
    "gfx942": POINTWISE | PRODUCTS | {name: TABLE[name] for name in ("prefill 128 bf16", "decode 128 bf16")},
}
QUICK = {
    "sm_80": ("int8 few rows", "int4 few rows", "int4 many rows"),
    "sm_90": ("int8 few rows", "int4 few rows", "int4 some rows", "int4 many rows", "int4 few rows fp32"),
    "gfx942": ("int4 few rows", "int8 many rows"),
}
"""The products of the short version; the long one has all."""


def names(target: str) -> list[Any]:
    """Parameters of a test over all entries of `target`."""
    products = {*PRODUCTS, *PRODUCT_VARIANTS} - set(QUICK[target])
    return [pytest.param(name, marks=pytest.mark.full) if name in products else name for name in ENTRIES[target]]


def check_cuda(target: str, name: str, recorded: dict[str, dict[str, int]], record: Callable[[str, Any], None]) -> None:
    """Compile one entry; `recorded` are the facts of an earlier compilation by the same version of Triton."""
    with compiling_for(target) as compiled:
        ENTRIES[target][name]()
    assert compiled
    for kernel_name, kernel in compiled:
        facts = cuda_facts(kernel)
        label = f"{target} {name}: {kernel_name.removesuffix('_kernel')}"
        record("facts", (label, facts.row()))
        assert facts.stack == 0 and facts.local == 0, f"{label} spills registers: {facts}"
        assert facts.shared <= SHARED_MEMORY[target], f"{label}: {facts}"
        assert facts.loads_16_bit == 0, f"{label} lost vector loads: {facts}"
        if kernel_name in ATTENTION:
            check_attention(target, label, facts, kernel, wide=" fp32" in name)
        if kernel_name == PRODUCT:
            check_product(target, label, facts, kernel)
        if label in recorded:
            expected = recorded[label]["registers"]
            assert abs(facts.registers - expected) <= REGISTERS_MAY_DIFFER_BY * expected, f"{label}: {facts}"


def check_attention(target: str, label: str, facts: CodeFacts, kernel: Any, wide: bool) -> None:
    """float32 is for exactness: it needs tensor cores and copies, not warp groups or depth."""
    warp_groups = target == "sm_90" and kernel.name.startswith("_prefill") and not wide
    assert (facts.hgmma > 0) == warp_groups, f"{label}: {facts}"
    assert (facts.hmma > 0) != warp_groups, f"{label}: {facts}"
    assert facts.ldgsts > 0, f"{label} does not copy keys asynchronously: {facts}"
    if not wide:
        in_flight = [int(number) for number in re.findall(r"ttg\.async_wait.*\{num = (\d+)", kernel.asm["ttgir"])]
        assert max(in_flight) > 0, f"{label}: no keys are in flight while others are computed"


def check_product(target: str, label: str, facts: CodeFacts, kernel: Any) -> None:
    """Warp groups where there are any, and then the weights from registers; no load that the next step waits for."""
    warp_groups = target == "sm_90"
    assert (facts.hgmma > 0) == warp_groups and (facts.hmma > 0) != warp_groups, f"{label}: {facts}"
    code = kernel.asm["ttgir"]
    loop = code[code.index("scf.for") :]
    assert "tt.load" not in loop[: loop.index("scf.yield")], f"{label}: waits for loads within a step"
    in_flight = [int(number) for number in re.findall(r"ttg\.async_wait.*\{num = (\d+)", code)]
    assert max(in_flight) > 0, f"{label}: nothing is in flight while others are computed"
    if warp_groups:
        left = re.findall(r"ttng\.warp_group_dot (%\w+)", code)
        assert left and all(f"{name} = ttg.local_alloc" not in code for name in left), f"{label}: weights are written"
