"""Policies that are one function, and what they heard."""

from schedlab.framework.policy import Policy


class Scripted(Policy):
    """Calls `decide(step)`, and keeps the events that it hears."""

    def __init__(self, decide):
        self.decide = decide
        self.heard = []

    def schedule(self, step):
        self.decide(step)

    def observe(self, event):
        self.heard.append(event)


class InTurn(Scripted):
    """One function a step, then the last one for ever."""

    def __init__(self, *script):
        super().__init__(self._next)
        self.script = list(script)

    def _next(self, step):
        (self.script.pop(0) if len(self.script) > 1 else self.script[0])(step)


def everything(step):
    """What runs, then what waits, as far as it goes."""
    step.grant_decodes()
    for request in (*step.prefilling, *step.waiting):
        step.grant(request)
