"""`--full` runs the long versions: tests marked `full`, and 1,000 examples of every property instead of a few.

A test run has a cache of its own, without compiled kernels: what a user has built changes no test. Fetched models are
the user's, for they are the same for everybody.
"""

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("short", max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW)
settings.register_profile("full", max_examples=1000, deadline=None, suppress_health_check=SLOW)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the long versions of the tests too")


def own_cache() -> tempfile.TemporaryDirectory:
    """A folder that stands for the user's cache in this process and those it starts."""
    theirs = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "schedlab" / "models"
    made = tempfile.TemporaryDirectory(prefix="schedlab-tests-")
    ours = Path(made.name) / "schedlab"
    ours.mkdir()
    if theirs.is_dir():
        (ours / "models").symlink_to(theirs.resolve())
    os.environ["XDG_CACHE_HOME"] = made.name
    return made


def pytest_configure(config):
    config.add_cleanup(own_cache().cleanup)
    full = config.getoption("--full")
    settings.load_profile("full" if full else "short")
    if full:
        config.option.markexpr = ""
