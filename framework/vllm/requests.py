"""A vLLM request as a policy sees it. What vLLM has no field for arrives in its sampling parameters' `extra_args`.

The OpenAI server fills these from `vllm_xargs`, which takes flat keys only: `schedlab_client`, `schedlab_priority`
(larger is more urgent; without it, vLLM's own priority, where smaller is), `schedlab_deadline_s` and the limits
`schedlab_ttft_s`, `schedlab_tpot_s`, `schedlab_e2e_s` (seconds, of the request), `schedlab_session`,
`schedlab_predicted_output_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from schedlab.framework.content import IdContent
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO, EngineRequest, to_ns

PREFIX = "schedlab_"
LIMITS = ("ttft_s", "tpot_s", "e2e_s")
KINDS: Mapping[str, tuple[type, ...]] = {
    "client": (str,), "session": (str,), "priority": (int,), "predicted_output_tokens": (int,),
    **dict.fromkeys(("deadline_s", *LIMITS), (int, float)),
}  # fmt: skip


def read_extras(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `schedlab_` keys of a request, without the prefix. ConfigError for one that is unknown or ill-typed."""
    extras = {key[len(PREFIX) :]: value for key, value in (extra_args or {}).items() if key.startswith(PREFIX)}
    for key, value in extras.items():
        if key not in KINDS:
            raise ConfigError(f"{PREFIX}{key}: no such key; expected {', '.join(PREFIX + name for name in KINDS)}")
        if not isinstance(value, KINDS[key]) or isinstance(value, bool):
            raise ConfigError(f"{PREFIX}{key}: expected {' or '.join(k.__name__ for k in KINDS[key])}, found {value!r}")
        if isinstance(value, (int, float)) and key != "priority" and not 0 < value < math.inf:
            raise ConfigError(f"{PREFIX}{key}: expected a number above 0, found {value!r}")
    return extras


def request_of(theirs: Any, arrival_ns: int, now_ns: int, block_size: int) -> EngineRequest:
    """The request of an engine that nobody replays, visible now: its content is known by the hashes of its blocks."""
    extras = read_extras(theirs.sampling_params.extra_args)
    deadline_s = extras.get("deadline_s")
    ids = [int.from_bytes(bytes(block)[:8], "little") >> 1 for block in theirs.block_hashes]
    request = EngineRequest(
        theirs.request_id,
        arrival_ns,
        theirs.num_prompt_tokens,
        IdContent(ids, block_size),
        max_tokens=theirs.max_tokens,
        client=extras.get("client", "default"),
        priority=extras.get("priority", -theirs.priority),
        deadline_ns=None if deadline_s is None else arrival_ns + to_ns(deadline_s),
        session=extras.get("session", theirs.session_id),
        slo=_slo(extras),
        visible_ns=now_ns,
    )
    request._predicted = extras.get("predicted_output_tokens")
    return request


def _slo(extras: Mapping[str, Any]) -> SLO | None:
    """An objective of the request's own, named after its limits, so that equal ones are one class."""
    limits = {key: float(extras[key]) for key in LIMITS if key in extras}
    if not limits:
        return None
    return SLO(" ".join(f"{key[:-2]}<{value:g}s" for key, value in limits.items()), **limits)
