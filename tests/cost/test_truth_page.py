"""The page and the picture of how far the clock is from published runs, from made-up runs."""

from collections import Counter

import numpy as np
import pytest

from schedlab.experiments.bench.truth import WAYS, Judged, Row, page, picture


def row(number: int, tpot_s: float, hardware: str = "h100") -> Row:
    return Row(str(number), "llama3.1-8b", hardware, "vllm", "bf16", 1, 1, 1000, 101, 4, False, 0.1, tpot_s)


def says(factor: float, of: Row) -> dict[str, float]:
    return {"tpot": of.tpot_s * factor, "ttft": of.ttft_s * factor, "e2e": of.e2e_s * factor}


@pytest.fixture
def judged() -> Judged:
    runs = [row(0, 0.01), row(1, 0.02), row(2, 0.04, "b200")]
    factors = (1.1, 0.8, 1.5)
    found = [dict.fromkeys(WAYS, says(factor, run)) for factor, run in zip(factors, runs, strict=True)]
    return Judged(runs, [*found[:2], {**found[2], WAYS[2]: "no such table"}])


def test_errors_are_those_of_the_runs_that_a_way_can_model(judged):
    np.testing.assert_allclose(judged.errors(WAYS[0], "tpot"), [0.1, -0.2, 0.5])
    np.testing.assert_allclose(judged.errors(WAYS[2], "ttft"), [0.1, -0.2])
    lines = page(judged, Counter({"too large": 3}), {}).splitlines()
    (whole,) = (line for line in lines if line.startswith("| all |"))
    assert whole.startswith("| all | 3 | +10% / 20.0% / 44% |")
    assert "| too large | 3 |" in lines and f"| {WAYS[2]}: no such table | 1 |" in lines


def test_the_picture_has_both_axes_in_decades(judged, tmp_path):
    picture(judged, tmp_path / "truth.png")
    assert (tmp_path / "truth.png").read_bytes().startswith(b"\x89PNG")
