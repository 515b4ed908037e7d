"""A policy of somebody else's: decodes, then the prompt with the fewest tokens left; preempts the longest."""

from schedlab.framework.policy import Finished, Policy


class LeastRemaining(Policy):
    def __init__(self, chunk=96):
        self.chunk = chunk
        self.done = {}

    def observe(self, event):
        if isinstance(event, Finished):
            self.done[event.request.client] = self.done.get(event.request.client, 0) + event.request.num_output_tokens

    def schedule(self, step):
        for request in step.grant_decodes():
            if request.state != "running" or not step.token_budget:
                continue
            victim = max((r for r in step.running if r.state == "running"), key=lambda r: (r.num_tokens, r.request_id))
            step.preempt(victim)
            if victim is not request:
                step.grant(request)
        left = self.chunk
        line = [*step.prefilling, *step.waiting]
        for request in sorted(line, key=lambda r: (r.num_tokens - step.cached_tokens(r), r.request_id)):
            if left <= 0 or request.state not in ("running", "waiting", "preempted"):
                continue
            needed = step.blocks_needed(request, request.num_tokens - step.cached_tokens(request))
            if request.state != "running" and (request in step.running or needed + 2 > step.free_blocks):
                continue
            left -= step.grant(request, left).tokens
