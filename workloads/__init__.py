"""Where requests come from: recorded traces, their readers and writers, synthetic traffic."""

if not __name__.startswith("schedlab."):
    raise ImportError(f"import this package as schedlab.{__name__}, not as {__name__}")
