"""Files of every format, damaged at random: a reader gives a sound trace or one line that names the file."""

import gzip
import json
import warnings

import numpy as np
import pytest
import rows
from hypothesis import given
from hypothesis import strategies as st

from schedlab.framework.errors import SchedlabError
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers import read
from schedlab.workloads.source import Terms
from schedlab.workloads.trace import Trace
from schedlab.workloads.workload import make_source

ODD_VALUES = [
    "NaN", "-NaN", "Infinity", "-1", "-0.0", "1e999", "1e-999", "9" * 30, "9" * 5000, "0x1F", "1_000", "١٢", "true",
    "null", "''", '""', "[]", "{}", "[[]]", "[1,", "1.5", "12.0", "2023-11-16 18:17:03", "99999-01-01 00:00:00", "\x00",
    "é", "\u2028", "a,b", '"', "18446744073709551616", "[" * 3000,
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
]  # fmt: skip
ODD_BYTES = [b"\xff\xfe", b"\x00", "é".encode("latin-1"), b"\xef\xbb\xbf", b"\r", b"\n", b'"', b"\x1f\x8b"]


def value_span(draw, text: str) -> tuple[int, int]:
    """The extent of one value: between the separators of csv and JSON."""
    start = draw(st.integers(0, max(len(text) - 1, 0)))
    separators = ',:[]{}\n"'
    while start and text[start - 1] not in separators:
        start -= 1
    stop = start
    while stop < len(text) and text[stop] not in separators:
        stop += 1
    return start, stop


@st.composite
def damaged(draw, text: str) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        lines = text.splitlines(keepends=True) or [""]
        place = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["value", "cut", "drop", "repeat", "swap", "key", "many"]))
        if kind == "value":
            start, stop = value_span(draw, text)
            text = text[:start] + draw(st.sampled_from(ODD_VALUES)) + text[stop:]
        elif kind == "cut":
            text = text[: draw(st.integers(0, len(text)))]
        elif kind == "drop":
            text = "".join(lines[:place] + lines[place + 1 :])
        elif kind == "repeat":
            text = "".join(lines[: place + 1] + lines[place:])
        elif kind == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[place], lines[other] = lines[other], lines[place]
            text = "".join(lines)
        elif kind == "key":
            start = draw(st.integers(0, len(text)))
            text = text[:start] + draw(st.sampled_from("xX_ 9")) + text[start:]
        elif len(lines) < 10:  # more rows than one batch holds
            text = "".join(lines[:1] + lines[1:] * 300)
    data = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        place = draw(st.integers(0, len(data)))
        data = data[:place] + draw(st.sampled_from(ODD_BYTES)) + data[place:]
    if draw(st.integers(0, 9)) == 0:
        data = gzip.compress(data)
        data = data[: draw(st.integers(0, len(data)))]
    return data


def assert_sound(trace: Trace) -> None:
    """What every trace promises, whatever file it came from."""
    n = len(trace)
    assert n and (trace.prompt_tokens > 0).all() and (trace.output_tokens != 0).all()
    assert (np.diff(trace.arrival_ns) >= 0).all() and trace.arrival_ns[0] >= 0
    assert all(len(column) == n for _, column in trace.columns())
    if trace.after is not None:
        tied = trace.after >= 0
        assert (trace.after < n).all() and (trace.think_ns[tied] >= 0).all()
        assert (trace.arrival_ns[trace.after[tied]] <= trace.arrival_ns[tied]).all() or trace.stamped is None
    if trace.ids is not None:
        widths = trace.ids.token_widths(trace.prompt_tokens)
        covered = np.bincount(np.repeat(np.arange(n), trace.ids.counts), weights=widths, minlength=n)
        assert (widths > 0).all() and (covered <= trace.prompt_tokens).all()
    source = make_source(trace, Terms(slo_classes=trace.slo_classes))
    assert source.pop(source.peek())


@pytest.mark.parametrize("name", rows.FILES)
@given(data=st.data())
def test_damaged_files(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("damaged")
    path = rows.write(folder, name, "")
    path.write_bytes(data.draw(damaged(rows.FILES[name][1])))
    format = data.draw(st.sampled_from([None, name.partition("-")[0]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*read up to", category=UserWarning)
        try:
            trace = read(path, format, ReadOptions(strict=data.draw(st.booleans())))
        except SchedlabError as error:
            message = str(error)
            assert str(folder) in message and "\n" not in message and len(message) < 1500
            return
        assert_sound(trace)


@pytest.mark.parametrize("name", rows.FILES)
def test_the_files_themselves_are_sound(tmp_path, name):
    assert_sound(read(rows.write(tmp_path, name)))


@given(
    st.text(max_size=200) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps)
)
def test_files_of_anything(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("anything") / "file"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with warnings.catch_warnings(), pytest.raises(SchedlabError):
        warnings.filterwarnings("ignore", message=".*read up to", category=UserWarning)
        read(path)
