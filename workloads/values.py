"""Strict parsing of single values and whole columns: token counts, times, stamps, ids.

A column is parsed in bulk where all its values are plain; otherwise value by value, which finds the faulty one. Numeric
strings are accepted ("12", "12.0", "1e3"); booleans, NaN, infinities, negatives and fractions of a token are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from schedlab.workloads.files import shown

MAX_TOKENS = 2**31 - 1
MAX_NS = 2**62
UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?\Z")
_DECIMAL = re.compile(r"[0-9.]*")
_TO_ZERO = str.maketrans("123456789", "0" * 9)
_EPOCH = datetime(1970, 1, 1)
EXACT_FLOAT = 2.0**50
"""Below this many ns a float64 time, itself rounded, still rounds to the right ns."""


class BadValue(ValueError):
    """A value that cannot be used; `row` is its place in the column."""

    def __init__(self, row: int, value: object, expected: str) -> None:
        super().__init__(f"is {shown(value)}, expected {expected}")
        self.row = row


def parse_each(values: Sequence[Any], parse: Callable[[Any], int], expected: str) -> np.ndarray:
    """int64 [len(values)]; raises BadValue at the first value that `parse` rejects with ValueError."""
    out = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        try:
            out[row] = parse(value)
        except (ValueError, TypeError, ArithmeticError):
            raise BadValue(row, value, expected) from None
    return out


def plain_integers(values: Sequence[Any]) -> np.ndarray | None:
    """int64 column if every value is an int, or every one a string of digits; None if any is anything else."""
    kinds = set(map(type, values))
    try:
        if kinds == {int}:
            return np.array(values, dtype=np.int64)
        if kinds == {str} and "" not in values and (text := "".join(values)).isascii() and text.isdigit():
            return np.array(list(map(int, values)), dtype=np.int64)
    except (OverflowError, ValueError):
        pass
    return None


def counts(values: Sequence[Any]) -> np.ndarray:
    """Token counts, int64."""
    bulk = plain_integers(values)
    if bulk is not None and len(bulk) and bulk.min() >= 0 and bulk.max() <= MAX_TOKENS:
        return bulk
    return parse_each(values, parse_count, f"a token count from 0 to {MAX_TOKENS}")


def integers(values: Sequence[Any], low: int = 0, high: int = MAX_TOKENS, absent: int = -1) -> np.ndarray:
    """Whole numbers within [low, high], int64; None and empty cells read as `absent`."""

    def parse(value: Any) -> int:
        return absent if value is None or value == "" else _within(_whole(value), low, high)

    return parse_each(values, parse, f"a whole number from {low} to {high}")


def parse_count(value: Any) -> int:
    return _within(_whole(value), 0, MAX_TOKENS)


def _whole(value: Any) -> int:
    number = exact(value)
    if number != int(number):
        raise ValueError
    return int(number)


def times(values: Sequence[Any], unit_ns: int) -> np.ndarray:
    """Times in units of `unit_ns` nanoseconds, as int64 ns; decimal fractions are exact down to 1 ns."""
    bulk = plain_integers(values)
    if bulk is not None and len(bulk) and bulk.min() >= 0 and bulk.max() <= MAX_NS // unit_ns:
        return bulk * unit_ns
    floats = plain_floats(values)
    if floats is not None and len(floats) and floats.min() >= 0 and floats.max() < EXACT_FLOAT / unit_ns:
        rounded: np.ndarray = np.rint(floats * unit_ns).astype(np.int64)
        return rounded
    return parse_each(values, lambda v: parse_time(v, unit_ns), "a finite time of at least 0")


def plain_floats(values: Sequence[Any]) -> np.ndarray | None:
    """float64 column if all are numbers, or all strings of digits and points; None if any is anything else."""
    kinds = set(map(type, values))
    try:
        if kinds <= {int, float} or (kinds == {str} and _DECIMAL.fullmatch("".join(values))):
            floats = np.array(list(map(float, values)), dtype=np.float64)
            return floats if bool(np.isfinite(floats).all()) else None
    except (OverflowError, ValueError):
        pass
    return None


def parse_time(value: Any, unit_ns: int) -> int:
    return _within(int((exact(value) * unit_ns).to_integral_value()), 0, MAX_NS)


def exact(value: Any) -> Decimal:
    """The number that is written, without binary rounding. Raises ValueError for what is no finite number."""
    if type(value) is int:
        return Decimal(_within(value, -MAX_NS, MAX_NS))
    if type(value) is float:
        value = repr(value)
    if type(value) is not str or "_" in value or not value.isascii():
        raise ValueError
    try:
        number = Decimal(value.strip())
    except InvalidOperation:
        raise ValueError from None
    if not number.is_finite() or abs(number) > MAX_NS:
        raise ValueError
    return number


def _within(number: int, low: int, high: int) -> int:
    if not low <= number <= high:
        raise ValueError
    return number


def stamps(values: Sequence[str]) -> tuple[np.ndarray, bool]:
    """Wall-clock stamps as int64 ns since 1970, and whether they carry a UTC offset; a mixture is an error.

    Fractions of 0 to 9 digits may be mixed in one file.
    """
    aware = _has_offset(values[0]) if values else False
    bulk = plain_stamps(values)
    if bulk is not None:
        return bulk, aware

    def parse(value: str) -> int:
        if _has_offset(value) != aware:
            raise ValueError
        return parse_stamp(value)

    kind = "with" if aware else "without"
    return parse_each(values, parse, f"a stamp like 2023-11-16 18:17:03.979960, {kind} a UTC offset as in row 0"), aware


def plain_stamps(values: Sequence[Any]) -> np.ndarray | None:
    """int64 ns if all stamps have the length of the first and no offset, or all UTC; None if any is anything else."""
    if set(map(type, values)) != {str} or not values[0].isascii():
        return None
    first: str = values[0]
    utc = next((end for end in ("+00:00", "Z") if first.endswith(end)), "")
    digits = len(first) - len(utc) - len("2023-11-16 18:17:03.")
    shape = "0000-00-00 00:00:00" + ("." + "0" * digits if digits > 0 else "") + utc.translate(_TO_ZERO)
    joined = "".join(values)
    if joined.replace("T", " ").translate(_TO_ZERO) != shape * len(values) or digits > 9:
        return None
    if utc and joined.count(utc) != len(values):
        return None
    try:
        return np.array([v[: len(v) - len(utc)] for v in values], dtype="datetime64[ns]").astype(np.int64)
    except ValueError:
        return None


def is_stamp(value: str) -> bool:
    return _STAMP.match(value) is not None


def parse_stamp(value: str) -> int:
    """ns since 1970-01-01 00:00 (UTC if the stamp carries an offset, else of its own clock)."""
    match = _STAMP.match(value)
    if match is None or not value.isascii():
        raise ValueError
    moment, fraction, offset = match.groups()
    elapsed = datetime.fromisoformat(moment) - _EPOCH
    ns = (elapsed.days * 86_400 + elapsed.seconds) * UNITS["s"] + (int(fraction.ljust(9, "0")) if fraction else 0)
    if offset in (None, "Z", "+00:00"):
        return _within(ns, -MAX_NS, MAX_NS)
    hours, minutes = int(offset[1:3]), int(offset[-2:])
    east = (hours * 60 + minutes) * 60 * UNITS["s"]
    return _within(ns - east if offset[0] == "+" else ns + east, -MAX_NS, MAX_NS)


def _has_offset(value: Any) -> bool:
    return isinstance(value, str) and (value.endswith("Z") or value[-6:-5] in ("+", "-") or value[-5:-4] in ("+", "-"))


class IdInterner:
    """Block ids of any integer or string type as int64, one to one: small integers stand for themselves."""

    _BIG = 2**62

    def __init__(self) -> None:
        self._other: dict[int | str, int] = {}

    def __call__(self, ids: list[Any]) -> np.ndarray:
        """int64 [len(ids)]. Raises ValueError for an id that is neither an integer nor a string."""
        if set(map(type, ids)) <= {int}:
            try:
                bulk = np.array(ids, dtype=np.int64)
            except OverflowError:
                bulk = np.array([self._BIG])
            if not len(bulk) or (bulk.min() >= -self._BIG and bulk.max() < self._BIG):
                return bulk
        return np.array([self._one(i) for i in ids], dtype=np.int64)

    def _one(self, value: Any) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int and -self._BIG <= value < self._BIG:
            return value
        if type(value) is not int and type(value) is not str:
            raise ValueError(f"block id {shown(value)}, expected an integer or a string")
        return self._other.setdefault(value, self._BIG + len(self._other))
