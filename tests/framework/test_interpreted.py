"""Where the core is compiled: the tests that replace parts of it, run where the same files are interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from schedlab import core

HERE = Path(__file__).parent
FILES = ("test_mutants.py", "test_fast_forward.py", "test_chains.py")


@pytest.mark.skipif(core.mode() == "interpreted", reason="they run here")
@pytest.mark.parametrize("name", FILES)
def test_every_mutant_is_killed(name):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "faulty or found_out"]
    done = subprocess.run(
        [*command, str(HERE / name)],
        env={**os.environ, core.OFF: "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
