"""Drives a source without an engine: every request takes a given time, any number at once."""

import heapq
from collections.abc import Callable

from schedlab.framework.request import EngineRequest
from schedlab.framework.source import Source


def replay(
    source: Source, service_ns: Callable[[EngineRequest], int] = lambda r: 50_000_000
) -> list[tuple[int, EngineRequest]]:
    """(time seen, request) in the order in which the source gave them out."""
    seen: list[tuple[int, EngineRequest]] = []
    running: list[tuple[int, int, EngineRequest]] = []
    while True:
        due = source.peek()
        if running and (due is None or running[0][0] <= due):
            now, _, request = heapq.heappop(running)
            source.finished(request, now)
        elif due is None:
            return seen
        else:
            popped = source.pop(due)
            assert popped, "peek promised a request"
            for request in popped:
                assert request.visible_ns <= due
                heapq.heappush(running, (due + service_ns(request), len(seen), request))
                seen.append((due, request))


def facts(request: EngineRequest) -> tuple[object, ...]:
    """What must be equal for two requests to be the same request."""
    content = request.content
    state = {name: getattr(content, name) for name in type(content).__slots__}
    parts = {k: v.tolist() if hasattr(v, "tolist") else list(v) if isinstance(v, list | tuple) else v
             for k, v in state.items()}  # fmt: skip
    return (
        request.request_id, request._arrival_ns, request.visible_ns, request.delivery_ns, request.num_prompt_tokens,
        request.recorded_output_tokens, request.max_tokens, request.client, request.priority, request._deadline_ns,
        request.session, request.slo, request.abort_ns, request.sampling, request.source_row, type(content), parts,
    )  # fmt: skip
