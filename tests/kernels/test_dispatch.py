"""Which implementation serves a device, and that choosing one needs no triton."""

import subprocess
import sys

import pytest

from schedlab.kernels.dispatch import kernels


def test_unknown_backends_are_named():
    with pytest.raises(ValueError, match="kernels: backend must be triton, torch, native or reference, got 'cutlass'"):
        kernels("cpu", "cutlass")


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_backends_by_name(name):
    assert kernels("cpu", name).name == name
    assert kernels("cpu").name == "torch"


def in_a_process_without_triton(code: str) -> str:
    blocked = f"import sys; sys.modules['triton'] = None; {code}"
    return subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=True).stdout.strip()


def test_torch_and_reference_import_without_triton():
    code = "from schedlab.kernels.dispatch import kernels; print(kernels('cpu').name, kernels('cpu', 'reference').name)"
    assert in_a_process_without_triton(code) == "torch reference"


def test_triton_on_a_cpu_needs_the_interpreter():
    with pytest.raises(ValueError, match="kernels: triton runs on cuda, got device 'cpu'"):
        kernels("cpu", "triton")
