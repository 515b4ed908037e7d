"""The keys of a summary in words, and what is said to a key that is none. Definitions: framework/results/metrics.py."""

from __future__ import annotations

import difflib

from schedlab.framework.errors import ConfigError
from schedlab.framework.results.attempts import CLIENT_FIGURES
from schedlab.framework.results.groups import GROUP_FIGURES, TURNED_AWAY
from schedlab.framework.results.metrics import SUMMARY_KEYS

MEANINGS = {
    "ttft": "s, from the intended arrival to the first token",
    "tpot": "s, (last token - first token) / (tokens - 1) of each request with two tokens or more",
    "itl": "s, every gap between two tokens, pooled over requests",
    "e2e": "s, from the intended arrival to the last token",
    "queue": "s, from the policy's first sight of a request to its first grant",
    "throughput/requests_per_s": "finished requests, from the first arrival to the last token",
    "throughput/output_tokens_per_s": "generated tokens, over the same time",
    "throughput/total_tokens_per_s": "prompt and generated tokens, over the same time",
    "goodput/requests_per_s": "finished requests that meet every limit of their SLO class",
    "slo/attainment": "the share of the offered requests that do; one without a limit does if it finishes",
    "slo/attainment_limited": "the same share of the requests that have a limit, where others have none",
    "prefix/hit_rate": "prompt tokens found in the prefix cache at the first admission, as a share of all",
    "prefix/tokens_reused": "how many these are",
    "prefix/tokens_resumed": "tokens found in it after preemptions",
    "preemptions/recompute": "preemptions that threw keys and values away",
    "preemptions/swap": "preemptions that kept them on the host",
    "recomputed_tokens": "tokens that were computed more than once",
    "kv": "share of the KV blocks in use, over time",
    "batch/tokens_mean": "tokens of a step, over time",
    "batch/requests_mean": "requests of a step, over time",
    "batch/idle_slot_share": "share of the slots that no request of the step used, over time",
    "fairness/jain": "Jain's index over clients of tokens served for each token asked for, at the last arrival",
    "requests": "how many requests ended in this way",
    "requests/offered": "requests that arrived",
    "backlog_end": "requests that had not ended when the run did",
    "makespan_s": "s, from the first arrival to the last token",
    "scheduler/us_per_step": "µs that the policy took for a step",
    "steps": "engine iterations",
    "bound": "share of the steps' time that this bounds, where the cost is modelled",
}
"""By key, or by what stands before its slash."""


def meaning(key: str) -> str:
    """What a key of the summary is, in a line."""
    return MEANINGS.get(key) or MEANINGS[key.partition("/")[0]]


def show_metrics() -> None:
    """Every key with its meaning."""
    width = max(map(len, SUMMARY_KEYS))
    for key in SUMMARY_KEYS:
        print(f"{key:<{width}}  {meaning(key)}")


OF_SOME_RUNS = ("shed_share", "requests/timed_out", "requests/abandoned", "goodput/share")


def _of_a_part(key: str) -> bool:
    """Whether a run with several classes or clients, with requests turned away or clients that leave, may have this."""
    kind, _, rest = key.partition("/")
    if kind in ("class", "client"):
        return rest.rpartition("/")[2] in GROUP_FIGURES
    if key.startswith("program/duration/"):
        return key.rpartition("/")[2] in ("mean", "p50", "p99")
    if kind == "offered" and rest.startswith(("ttft/", "e2e/")):
        return rest in SUMMARY_KEYS
    return (
        key in OF_SOME_RUNS
        or (kind == "requests" and rest in TURNED_AWAY)
        or (kind == "offered" and rest in CLIENT_FIGURES)
    )


def check_metric(key: str, option: str) -> None:
    """ConfigError for a `key` that is no metric, given as `option`."""
    if key in SUMMARY_KEYS or _of_a_part(key):
        return
    close = difflib.get_close_matches(key, SUMMARY_KEYS)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise ConfigError(f"{option} {key}: no such metric; {hint}schedlab metrics lists all {len(SUMMARY_KEYS)}")
