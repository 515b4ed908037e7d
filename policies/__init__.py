"""Scheduling policies, one file each. A policy sees only Policy, Step, Request and events."""

if not __name__.startswith("schedlab."):
    raise ImportError(f"import this package as schedlab.{__name__}, not as {__name__}")
