"""The four policies with knobs that bite on tiny engines."""

from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse

FOUR = {
    "fcfs": FCFS,
    "chunked_prefill": lambda **knobs: ChunkedPrefill(chunk_size=12, **knobs),
    "decode_priority": lambda **knobs: DecodePriority(
        stall_tokens=5, max_prefill_streak=2, watermark_blocks=2, **knobs
    ),
    "prefix_reuse": lambda **knobs: PrefixReuse(chunk_size=12, aging_tokens_per_s=2000.0, **knobs),
}
SWAPPING = {f"{name}/swap": (lambda make=make: make(preempt_mode="swap")) for name, make in FOUR.items()}
ALL = {**FOUR, **SWAPPING}
