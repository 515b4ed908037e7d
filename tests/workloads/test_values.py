"""Strict parsing: the bulk paths agree with the exact one, and what is no number is refused with its place."""

from datetime import datetime
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.workloads import values
from schedlab.workloads.values import BadValue

decimals = st.decimals(min_value=0, max_value=10**6, allow_nan=False, allow_infinity=False, places=6)


@given(st.lists(decimals, min_size=1, max_size=20), st.sampled_from(["ns", "us", "ms", "s"]))
def test_times_are_exact_as_text_and_as_numbers(numbers, unit):
    scale = values.UNITS[unit]
    expected = [int((n * scale).to_integral_value()) for n in numbers]
    assert values.times([format(n, "f") for n in numbers], scale).tolist() == expected
    assert values.times([float(n) for n in numbers], scale).tolist() == expected


@given(st.lists(st.integers(0, values.MAX_TOKENS), min_size=1))
def test_counts_read_alike_in_every_spelling(numbers):
    for spelling in (int, str, float, lambda n: f"{n}.0", lambda n: f" {n} "):
        assert values.counts([spelling(n) for n in numbers]).tolist() == numbers


@pytest.mark.parametrize(
    "value", ["", " ", "x", "1_0", "-1", -1, 1.5, "1.5", True, False, None, float("nan"), "nan", float("inf"), "inf",
              "-inf", 2**31, 10**400, "9" * 400, "1e999999999", "١", [], {}, "0x10"],
)  # fmt: skip
def test_what_is_no_token_count_is_refused_where_it_stands(value):
    with pytest.raises(BadValue) as raised:
        values.counts([1, 2, value, 3])
    assert raised.value.row == 2


@pytest.mark.parametrize(
    "value", ["", "nan", "-0.001", float("inf"), float("-inf"), -1, True, None, "1_0", 1e300, "1e30", 2**63]
)
def test_what_is_no_time_is_refused_where_it_stands(value):
    with pytest.raises(BadValue) as raised:
        values.times([0, value], values.UNITS["s"])
    assert raised.value.row == 1


def test_times_beyond_the_range_of_floats_are_exact():
    assert values.times(["19440110.123456789"], values.UNITS["s"]).tolist() == [19440110123456789]
    assert values.times([19440110.5, 19440110], values.UNITS["s"]).tolist() == [19440110500000000, 19440110000000000]


stamp = st.builds(
    lambda moment, digits, fraction: (
        moment.strftime("%Y-%m-%d %H:%M:%S") + ("." + fraction[:digits] if digits else ""),
        int((moment - datetime(1970, 1, 1)).total_seconds()) * 10**9 + int((fraction[:digits] or "0").ljust(9, "0")),
    ),
    st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1)),
    st.integers(0, 9),
    st.text("0123456789", min_size=9, max_size=9),
)


@given(st.lists(stamp, min_size=1, max_size=10), st.sampled_from(["", "Z", "+00:00"]))
def test_stamps_of_any_mixture_of_digits(pairs, offset):
    ns, aware = values.stamps([text + offset for text, _ in pairs])
    assert ns.tolist() == [expected for _, expected in pairs]
    assert aware == bool(offset)


def test_stamps_with_offsets_are_in_utc():
    ns, _ = values.stamps(["2024-05-10 02:00:00+02:00", "2024-05-10 00:00:00.000001+00:00", "2024-05-09 19:30:00-0430"])
    assert np.diff(ns).tolist() == [1000, -1000]


@pytest.mark.parametrize(
    "bad",
    ["2023-13-01 00:00:00", "2023-01-01", "now", "NaT", "2023-01-01 00:00:00+00:00", "", "2023-01-01 00:00:00.", 5],
)
def test_what_is_no_stamp_like_the_others_is_refused(bad):
    good = "2023-01-01 00:00:00"
    with pytest.raises(BadValue) as raised:
        values.stamps([good, good, bad])
    assert raised.value.row == 2


ids = st.one_of(st.integers(-(2**70), 2**70), st.text("0123456789abcdefx", min_size=1, max_size=12))


@given(st.lists(st.lists(ids, max_size=6), max_size=8))
def test_interned_ids_are_equal_where_the_ids_are(rows):
    intern = values.IdInterner()
    numbers = [intern(row).tolist() for row in rows]
    flat = [(type(i).__name__, i) for row in rows for i in row]
    interned = [n for row in numbers for n in row]
    assert [a == b for a in flat for b in flat] == [a == b for a in interned for b in interned]


@pytest.mark.parametrize("bad", [True, None, 1.5, [1], {}])
def test_ids_of_other_types_are_refused(bad):
    with pytest.raises(ValueError, match="expected an integer or a string"):
        values.IdInterner()([1, bad])


def test_exact_is_what_is_written():
    assert values.exact(0.1) == Decimal("0.1")
