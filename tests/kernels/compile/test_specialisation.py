"""How many variants of a kernel a serving engine would compile: one."""

import launches
from harness import specialisations
from launches import attention


def test_one_compilation_serves_every_batch():
    """Neither the number of sequences or tokens nor the width of the tables is compiled in."""
    with specialisations() as found:
        for batch in range(1, 65):
            attention("decode", sequences=batch, columns=3 * batch)
            attention("prefill", sequences=batch, columns=5 * batch, tokens=7 * batch)
            for launch in (launches.norm, launches.head_norm, launches.activation, launches.rope, launches.sampling):
                launch(batch)
    counts = {name: len(keys) for name, keys in found.items()}
    assert counts.pop("rms_norm_kernel") == 2, "with a residual, and of heads"
    assert set(counts.values()) == {1}, counts


def test_products_are_compiled_once_for_each_class_of_rows():
    """And once more where few are not split; not again for another matrix of the same alignment."""
    with specialisations() as found:
        for rows in (*range(1, 66), 129, 1000):
            launches.product("int4", rows)
        for columns, depth in ((6144, 4096), (28672, 4096), (4096, 14336), (1024, 2048)):
            launches.product("int4", 1, columns=columns, depth=depth)
    assert {name: len(keys) for name, keys in found.items()} == {"product_kernel": 4, "sum_kernel": 1}


def test_window_length_is_not_compiled_in():
    with specialisations() as found:
        for window in (1, 16, 100, 4096):
            attention("decode", window=window)
            attention("prefill", window=window)
    assert {name: len(keys) for name, keys in found.items()} == dict.fromkeys(found, 1)
