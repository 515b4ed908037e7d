"""The compile suite with the oldest supported Triton: the one of the GPU machines that the kernels are meant for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "3.6.0"
SUITE = Path(__file__).parent / "compile"


@pytest.mark.full
def test_compile_suite(tmp_path):
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
        f"triton=={VERSION}",
    ]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"triton {VERSION} cannot be installed here: {installed.stderr.splitlines()[-1]}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    suite = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", str(SUITE)]
    result = subprocess.run(suite, capture_output=True, text=True, env=environment, cwd=SUITE.parents[2])
    assert result.returncode == 0, result.stdout[-4000:]
