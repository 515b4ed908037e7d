"""All policies, with knobs that bite on tiny engines: the four of the demo, and the others."""

from schedlab.framework.cost.estimator import LinearEstimator
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.edf import EDF
from schedlab.policies.fair import Fair
from schedlab.policies.fastserve import FastServe
from schedlab.policies.fcfs import FCFS
from schedlab.policies.hrrn import HRRN
from schedlab.policies.multilevel_feedback import MultilevelFeedback
from schedlab.policies.orca import Orca
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.policies.priority import Priority
from schedlab.policies.sarathi import Sarathi
from schedlab.policies.sglang_lpm import SGLangLPM
from schedlab.policies.sjf import SJF
from schedlab.policies.slo_aware import SLOAware
from schedlab.policies.srpt import SRPT
from schedlab.policies.static_batching import StaticBatching
from schedlab.policies.vllm_v1 import VLLMV1

FOUR = {
    "fcfs": FCFS,
    "chunked_prefill": lambda **knobs: ChunkedPrefill(chunk_size=12, **knobs),
    "decode_priority": lambda **knobs: DecodePriority(
        stall_tokens=5, max_prefill_streak=2, watermark_blocks=2, **knobs
    ),
    "prefix_reuse": lambda **knobs: PrefixReuse(chunk_size=12, aging_tokens_per_s=2000.0, **knobs),
}
ESTIMATOR = LinearEstimator(step=0.001, token=0.00001)
"""What the stub's steps take."""
OTHERS = {
    "priority": lambda **knobs: Priority(chunk_size=12, **knobs),
    "priority/patient": lambda **knobs: Priority(chunk_size=12, preempt_running=False, **knobs),
    "edf": lambda **knobs: EDF(chunk_size=12, default_deadline_s=0.05, **knobs),
    "slo_aware": lambda **knobs: SLOAware(ESTIMATOR, chunk_size=12, min_chunk=2, patience_s=0.05, **knobs),
    "sjf": lambda **knobs: SJF(chunk_size=12, aging_tokens_per_s=2000.0, **knobs),
    "hrrn": lambda **knobs: HRRN(chunk_size=12, **knobs),
    "fair": lambda **knobs: Fair(chunk_size=12, **knobs),
    "multilevel_feedback": lambda **knobs: MultilevelFeedback(
        **{"chunk_size": 12, "quantum": 2, "prompt_weight": 0.1, "promote_after_s": 0.05, **knobs}
    ),
    "static_batching": lambda **knobs: StaticBatching(batch_size=3, **knobs),
    "orca": Orca,
    "sarathi": lambda **knobs: Sarathi(chunk_size=12, low_chunk_size=4, chunk_schedule_tokens=40, **knobs),
    "sarathi/srpf": lambda **knobs: Sarathi(chunk_size=12, order="srpf", **knobs),
    "srpt": lambda **knobs: SRPT(chunk_size=12, **knobs),
    "sglang_lpm": lambda **knobs: SGLangLPM(chunk_size=12, fcfs_above=4, shared_threshold=8, **knobs),
    "fastserve": lambda **knobs: FastServe(
        ESTIMATOR, max_batch_size=3, base_quantum_s=0.002, promote_after_s=0.05, **knobs
    ),
    "fcfs/spare": lambda **knobs: FCFS(reserve_decode_block=True, **knobs),
    "vllm_v1": VLLMV1,
    "vllm_v1/priority": lambda **knobs: VLLMV1(order="priority", chunk_size=12, **knobs),
}
SWAPPING = {f"{name}/swap": (lambda make=make: make(preempt_mode="swap")) for name, make in FOUR.items()}
ALL = {**FOUR, **SWAPPING}
OTHERS_SWAPPING = {f"{name}/swap": (lambda make=make: make(preempt_mode="swap")) for name, make in OTHERS.items()}
EVERY = {**ALL, **OTHERS, **OTHERS_SWAPPING}
