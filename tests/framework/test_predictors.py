"""What each predictor says and when it learns, and that no decision can shift it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import MS, lab

from schedlab.framework.errors import ConfigError
from schedlab.framework.predictors import MaxPredictor, NoisyPredictor, OraclePredictor, QuantilePredictor
from schedlab.framework.testing.harness import Spec
from schedlab.policies.fcfs import FCFS


def request(name="r", output=100, *, live=False, client="default", max_tokens=500):
    made = Spec(name, 0, 8, output, live=live, client=client).request()
    made._max_tokens = max_tokens
    return made


def ended(output, client="default", state="finished"):
    made = request(output=output, client=client)
    made._base_tokens += output
    made._state = state
    return made


def test_max_and_oracle_say_the_worst_and_the_truth():
    assert MaxPredictor().predict(request(max_tokens=77)) == 77
    assert OraclePredictor().predict(request(output=9)) == 9
    assert OraclePredictor().predict(request(live=True)) is None


def test_noise_is_log_normal_of_median_one():
    predictor = NoisyPredictor(sigma=0.5)
    factors = np.log([predictor.predict(request(f"r{i}", 10_000)) / 10_000 for i in range(4000)])
    assert abs(np.median(factors)) < 0.03 and abs(factors.std() - 0.5) < 0.02
    assert abs(((factors - factors.mean()) ** 3).mean()) < 0.01, "symmetric in the logarithm"


def test_noise_depends_on_the_seed_and_the_name_alone():
    names = [f"r{i}" for i in range(50)]

    def drawn(seed, order):
        predictor = NoisyPredictor(seed=seed)
        said = {name: predictor.predict(request(name)) for name in order}
        return [said[name] for name in names]

    assert drawn(0, names) == drawn(0, names[::-1]) != drawn(1, names)
    assert NoisyPredictor(sigma=0.0).predict(request(output=37)) == 37
    assert NoisyPredictor(sigma=9.0).predict(request(output=1)) >= 1
    assert NoisyPredictor().predict(request(live=True)) is None


def test_noise_is_the_same_in_every_process():
    code = (
        "from schedlab.framework.predictors import NoisyPredictor; from schedlab.framework.testing.harness import Spec;"
        "print([NoisyPredictor().predict(Spec(f'r{i}', 0, 8, 100).request()) for i in range(9)])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("0", "4711")
    ]
    assert said[0] == said[1] == f"{[NoisyPredictor().predict(request(f'r{i}')) for i in range(9)]}\n"


@given(st.lists(st.integers(1, 400), min_size=8, max_size=60), st.floats(0, 1), st.integers(8, 40))
def test_a_quantile_of_the_last_window(lengths, share, window):
    """Against numpy's inverted empirical distribution."""
    predictor = QuantilePredictor(share, window=window, min_requests=8)
    for length in lengths:
        predictor.observe(ended(length))
    expected = np.quantile(lengths[-window:], share, method="inverted_cdf")
    assert predictor.predict(request()) == min(int(expected), 500)


def test_a_client_s_own_lengths_count_as_soon_as_there_are_enough():
    predictor = QuantilePredictor(0.5, min_requests=3)
    assert predictor.predict(request(max_tokens=400)) == 400, "knows nothing"
    for output in (10, 20, 30):
        predictor.observe(ended(output, client="a"))
    assert predictor.predict(request(client="b")) == 20, "everybody's"
    for output in (300, 310, 320):
        predictor.observe(ended(output, client="b"))
    assert predictor.predict(request(client="b")) == 310
    assert predictor.predict(request(client="a")) == 20
    assert predictor.predict(request(client="b", max_tokens=100)) == 100
    predictor.observe(ended(1, client="a", state="failed"))
    assert predictor.predict(request(client="a")) == 20, "what failed teaches nothing"


def test_predictions_are_made_at_arrival_and_learned_at_the_end():
    """Five requests of 6 tokens, one after another: from the third on the predictor knows."""
    trace = [Spec(f"r{i}", i * 20 * MS, 8, 6) for i in range(5)]
    made = lab(FCFS(), trace, predictor=QuantilePredictor(min_requests=2))
    made.finish()
    assert [r.predicted_output_tokens for r in made.requests.values()] == [248, 248, 6, 6, 6]


@pytest.mark.parametrize(
    "make",
    [
        lambda: NoisyPredictor(sigma=-1.0),
        lambda: NoisyPredictor(sigma=float("nan")),
        lambda: QuantilePredictor(1.5),
        lambda: QuantilePredictor(min_requests=0),
        lambda: QuantilePredictor(window=4, min_requests=5),
    ],
)
def test_a_knob_out_of_range_is_refused(make):
    with pytest.raises(ConfigError, match="predictor"):
        make()
