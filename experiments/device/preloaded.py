"""Imports, once for all sections, what most of them need. Not the place where a fault in it shows: a section does."""

from importlib import import_module
from traceback import print_exc

for name in ("compiling", "kernel_checks", "kernel_speeds", "engine_checks"):
    try:
        import_module(f"{__package__}.{name}")
    except Exception:
        print_exc()
