"""Every policy that ships, and a third party's, with knobs that bite on small engines."""

from third_party import LeastRemaining

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
from schedlab.policies.program_fcfs import ProgramFCFS
from schedlab.policies.program_feedback import ProgramFeedback
from schedlab.policies.program_las import ProgramLAS
from schedlab.policies.sarathi import Sarathi
from schedlab.policies.sglang_lpm import SGLangLPM
from schedlab.policies.shedding import Shedding
from schedlab.policies.sjf import SJF
from schedlab.policies.slo_aware import SLOAware
from schedlab.policies.srpt import SRPT
from schedlab.policies.static_batching import StaticBatching
from schedlab.policies.vllm_v1 import VLLMV1

TIMELESS = {
    "fcfs": FCFS,
    "chunked_prefill": lambda: ChunkedPrefill(chunk_size=128),
    "decode_priority": DecodePriority,
    "prefix_reuse": PrefixReuse,
    "orca": Orca,
    "vllm_v1": VLLMV1,
    "sarathi": lambda: Sarathi(chunk_size=128),
    "sglang_lpm": SGLangLPM,
    "third_party": LeastRemaining,
}
"""Those that decide without reading the clock."""
EVERY = {
    **TIMELESS,
    "fcfs/swap": lambda: FCFS(preempt_mode="swap"),
    "priority": lambda: Priority(chunk_size=128),
    "edf": lambda: EDF(chunk_size=128, default_deadline_s=0.05),
    "slo_aware": lambda: SLOAware(LinearEstimator(step=0.001, token=0.00001), chunk_size=128, patience_s=0.05),
    "sjf": lambda: SJF(chunk_size=128),
    "srpt": lambda: SRPT(chunk_size=128),
    "fastserve": lambda: FastServe(LinearEstimator(step=0.001, token=0.00001), max_batch_size=8),
    "hrrn": lambda: HRRN(chunk_size=128),
    "fair": lambda: Fair(chunk_size=128),
    "multilevel_feedback": lambda: MultilevelFeedback(chunk_size=128, promote_after_s=0.05),
    "static_batching": lambda: StaticBatching(batch_size=4),
    "shedding": lambda: Shedding(estimator=LinearEstimator(step=0.001, token=0.00001), chunk_size=128),
    "program_fcfs": lambda: ProgramFCFS(chunk_size=128),
    "program_las": lambda: ProgramLAS(chunk_size=128),
    "program_feedback": lambda: ProgramFeedback(chunk_size=128),
}
