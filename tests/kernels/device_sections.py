"""Sections that fail in every way, for the supervisor to outlive."""

import os
import time

from schedlab.experiments.device.rows import COPY, PRODUCT, Row


def good(device):
    yield Row("good", "a figure", 1.0, "", least=0.5)


def ceilings(device):
    yield Row("ceilings", COPY, 4.0, "TB/s")
    yield Row("ceilings", PRODUCT, 700.0, "TFLOP/s")


def after(device):
    yield Row("after", "ceilings of another process", device.copy_tb_s * device.matmul_tflops, "")


def hangs(device):
    yield Row("hangs", "before", float(os.getpid()), "")
    time.sleep(3600)


def never_lets_go(device):
    """A call that holds the interpreter's lock and hears no signal, as one into a driver may."""
    import ctypes

    yield Row("never_lets_go", "before", float(os.getpid()), "")
    ctypes.PyDLL(None).pause()


def raises(device):
    yield Row("raises", "before", 1.0, "")
    raise RuntimeError("no such kernel\nand more")


def leaves(device):
    yield Row("leaves", "before", 1.0, "")
    os._exit(3)


def crashes(device):
    import ctypes

    yield Row("crashes", "before", 1.0, "")
    ctypes.string_at(0)


def imports_what_is_not_there(device):
    import schedlab.no_such_module  # noqa: F401

    yield Row("imports", "nothing", 1.0, "")
