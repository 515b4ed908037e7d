"""The commands: they compose policies, workloads and engines, and write what happened to files."""

if not __name__.startswith("schedlab."):
    raise ImportError(f"import this package as schedlab.{__name__}, not as {__name__}")
