"""Every error that a user can cause, as one clear line.

Internal invariants are assertions instead: they say that the framework, not the user, is wrong.
"""

from __future__ import annotations

import traceback


class SchedlabError(ValueError):
    """A fault of input or use; the command line prints its one line and exits with 2."""


class ConfigError(SchedlabError):
    """A key, value or combination of settings that cannot be run."""


class TraceError(SchedlabError):
    """A trace file or row that cannot be used; names the file and the row."""


class ModelError(SchedlabError):
    """A model directory, checkpoint or tokenizer that cannot be used."""


class PolicyError(SchedlabError):
    """A policy broke a rule of the step transaction; names policy, request and rule."""

    def __init__(self, policy: str, rule: str, request_id: str | None = None) -> None:
        subject = f" on request {request_id}" if request_id is not None else ""
        super().__init__(f"policy {policy}{subject}: {rule}")
        self.policy = policy
        self.rule = rule
        self.request_id = request_id


def policy_fault(policy: str, method: str, error: Exception) -> PolicyError:
    """One line on what `method` of a policy raised, and where."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return PolicyError(policy, f"{method} raised {what} (at {where.filename}:{where.lineno})")


class PolicyStalled(PolicyError):
    """Work was present, and the policy neither granted anything nor idled explicitly."""
