"""A policy as somebody else would publish it: shortest prompt first, but nobody is passed over for too long."""

from dataclasses import dataclass

from schedlab import Policy, Step


@dataclass
class Patience(Policy):
    limit_s: float = 2.0

    def schedule(self, step: Step) -> None:
        before = step.token_budget
        refused = step.grant_decodes()
        for request in list(step.prefilling):
            step.grant(request)
        for request in sorted(step.waiting, key=lambda r: (step.now - r.arrival_s < self.limit_s, r.num_prompt_tokens)):
            if refused or not step.grant(request):
                break
        if refused and step.token_budget == before:
            step.preempt(step.decoding[-1])
            step.grant_decodes(step.decoding[:-1])
