"""ServeGen's clients: rates kept through bursts, shares under scaling, and one line for every fault in the data."""

import json

import numpy as np
import pytest

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads.servegen import ServeGen, ServeGenClient, Window
from schedlab.workloads.streams import stream


def client(folder, name="c", trace=None, lengths=None):
    windows = trace or "0,0,0,,0,0\n600,2.0,1,Gamma,1.0,0.5\n1200,0.5,4,Weibull,0.5,1.0\n"
    (folder / f"{name}-trace.csv").write_text(windows)
    data = lengths or {"0": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{3: 1.0}"}}
    (folder / f"{name}-dataset.json").write_text(json.dumps(data))
    return str(folder / name)


def test_idle_windows_are_silent_and_lengths_follow_the_data(tmp_path):
    trace = ServeGen(clients=[client(tmp_path)], duration_s=1800).load()
    times = trace.arrival_ns / 1e9
    assert times.min() >= 600 and (times < 1800).all()
    assert ((times >= 600) & (times < 1200)).sum() == pytest.approx(1200, abs=180)
    assert set(trace.prompt_tokens.tolist()) == {10, 20} and set(trace.output_tokens.tolist()) == {3}
    assert (trace.prompt_tokens == 20).mean() == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(
    "window", [Window(0, 1.0, "Gamma", 0.05), Window(0, 1.0, "Weibull", 0.3), Window(0, 1.0, "Gamma", 4.0)]
)
def test_bursty_windows_keep_their_rate(window):
    one = ServeGenClient("c", (window,), 600.0, {})
    counts = [len(one._times(window, stream(seed, "x"), 1.0)) for seed in range(400)]
    assert np.mean(counts) == pytest.approx(600, abs=5 * np.std(counts) / 20)


def test_target_rate_scales_all_clients_alike(tmp_path):
    a = client(tmp_path, "a")
    b = client(tmp_path, "b", "0,6,1,Gamma,1,0.16\n600,0,0,,0,0\n1200,0,0,,0,0\n")
    trace = ServeGen(clients=[a, b], duration_s=1800, target_rate=9.0).load()
    assert len(trace) / 1800 == pytest.approx(9.0, rel=0.05)
    share = np.mean([name == "b" for name in trace.client.tolist()])
    assert share == pytest.approx(3600 / 5100, abs=0.03)
    alone = ServeGen(clients=[b], duration_s=1800).load()
    both = ServeGen(clients=[a, b], duration_s=1800).load()
    mine = both.take(np.flatnonzero([name == "b" for name in both.client.tolist()]))
    assert np.array_equal(mine.arrival_ns, alone.arrival_ns), "a client's draws are its own"


def test_multimodal_prompts_are_sums(tmp_path):
    lengths = {
        "0": {
            "text_tokens": "{5: 1.0}",
            "image_tokens": "{100: 1.0}",
            "audio_tokens": "{0: 1.0}",
            "output_tokens": "{3: 1.0}",
        }
    }
    trace = ServeGen(clients=[client(tmp_path, lengths=lengths)], duration_s=1800).load()
    assert set(trace.prompt_tokens.tolist()) == {105}


def test_lengths_of_no_token_are_one_token_and_counted_or_an_error(tmp_path):
    lengths = {"0": {"input_tokens": "{0: 0.5, 20: 0.5}", "output_tokens": "{0: 0.5, 3: 0.5}"}}
    c = client(tmp_path, lengths=lengths)
    trace = ServeGen(clients=[c], duration_s=1800).load()
    raised = int(((trace.prompt_tokens == 1) | (trace.output_tokens == 1)).sum())
    assert set(trace.prompt_tokens.tolist()) == {1, 20} and set(trace.output_tokens.tolist()) == {1, 3}
    assert trace.provenance.counts == {"zero_lengths_raised_to_1": raised} and raised > len(trace) / 2
    with pytest.raises(TraceError, match=r"servegen: row \d+: client c has a prompt of .* expected at least 1 of each"):
        ServeGen(clients=[c], duration_s=1800, zero_lengths="error").load()
    assert not ServeGen(clients=[client(tmp_path, "d")], duration_s=1800).load().provenance.counts


@pytest.mark.parametrize(
    "trace, lengths, said",
    [
        ("0,1\n", None, r"c-trace\.csv: row 0 \(line 1\): \['0', '1'\], expected t, rate, cv, pattern, shape, scale"),
        ("0,x,1,Gamma,1,1\n", None, r"row 0 \(line 1\)"),
        ("0,nan,1,Gamma,1,1\n", None, "expected finite numbers of at least 0"),
        ("0,1,1,Pareto,1,1\n", None, "an active window of pattern 'Pareto', expected Gamma or Weibull with a shape"),
        ("0,1,1,,0,0\n", None, "an active window of pattern ''"),
        ("", None, r"c-trace\.csv: has no windows"),
        (
            None,
            {"0": {"input_tokens": "{}", "output_tokens": "{}"}},
            "c: active at 600 s, but its data has no lengths for then",
        ),
        (None, {"0": {"input_tokens": "__import__('os')", "output_tokens": "{}"}}, "not a map of windows"),
        (
            None,
            {"0": {"input_tokens": "{1: -1.0}", "output_tokens": "{1: 1.0}"}},
            "input_tokens has counts or probabilities",
        ),
        (
            None,
            {"0": {"input_tokens": "{1.5: 1.0}", "output_tokens": "{1: 1.0}"}},
            "input_tokens has counts or probabilities",
        ),
        (None, {"x": {}}, "not a map of windows"),
    ],
)
def test_faults_in_the_data_are_one_line(tmp_path, trace, lengths, said):
    prefix = client(tmp_path, lengths=lengths)
    if trace is not None:
        (tmp_path / "c-trace.csv").write_text(trace)
    with pytest.raises(TraceError, match=said):
        ServeGen(clients=[prefix], duration_s=1800).load()


def test_times_without_activity_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no client is active from 0 to 600 s"):
        ServeGen(clients=[client(tmp_path)], duration_s=600).load()
    with pytest.raises(ConfigError, match=r"needs workload\.clients"):
        ServeGen(clients=[])
    with pytest.raises(ConfigError, match=r"workload\.zero_lengths=drop, expected one of one, error"):
        ServeGen(clients=[client(tmp_path)], zero_lengths="drop")
