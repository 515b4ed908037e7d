"""`--full` runs the long versions: tests marked `full`, and 1,000 examples of every property instead of a few."""

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("short", max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW)
settings.register_profile("full", max_examples=1000, deadline=None, suppress_health_check=SLOW)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the long versions of the tests too")


def pytest_configure(config):
    full = config.getoption("--full")
    settings.load_profile("full" if full else "short")
    if full:
        config.option.markexpr = ""
