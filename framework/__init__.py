"""The scheduling core: requests, KV blocks, the step transaction, the engine, time, metrics and records.

Knows no policy, workload or experiment; imports only the standard library and numpy at import time.
"""

if not __name__.startswith("schedlab."):
    raise ImportError(f"import this package as schedlab.{__name__}, not as {__name__}")
