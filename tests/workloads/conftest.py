import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"


@pytest.fixture(scope="session")
def traces() -> Path:
    if not TRACES.is_dir():
        pytest.skip("the published traces are not at ../shared/traces")
    return TRACES
