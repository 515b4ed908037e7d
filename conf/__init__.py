"""Hydra configuration groups; each option names its class by `_target_`."""

if not __name__.startswith("schedlab."):
    raise ImportError(f"import this package as schedlab.{__name__}, not as {__name__}")
