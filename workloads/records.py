"""Records of csv and json files in batches, by column."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from json.scanner import make_scanner
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from schedlab.framework.errors import TraceError
from schedlab.workloads import values
from schedlab.workloads.files import Lines, at_row, collected_cuts, ended_within, listed, note_cut, open_text, shown
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import BadValue

BATCH = 512
"""Small, so that the records of a batch stay in the processor's cache."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records: `column(name)` gives their raw values; None where a json record lacks the key."""

    path: Path
    first_row: int
    lines: Sequence[int]
    column: Callable[[str], Sequence[Any]]
    keys: frozenset[str]

    def __len__(self) -> int:
        return len(self.lines)

    def fault(self, row: int, text: str) -> TraceError:
        """The error for the `row`-th record of this batch."""
        return at_row(self.path, self.first_row + row, self.lines[row], text)

    def rows(self) -> np.ndarray:
        return np.arange(self.first_row, self.first_row + len(self), dtype=np.int64)

    def has(self, name: str) -> bool:
        """Whether any record has the key, or a value at the path of keys that a name with dots is."""
        return name in self.keys or ("." in name and any(value is not None for value in self.column(name)))

    def counts(self, name: str) -> np.ndarray:
        """Token counts, int64."""
        return self.parse(name, values.counts)

    def times(self, name: str, unit: str) -> np.ndarray:
        """int64 ns of times in `unit`."""
        return self.parse(name, lambda v: values.times(v, values.UNITS[unit]))

    def optional_times(self, name: str, unit: str) -> np.ndarray:
        """As `times`, -1 where the value is absent."""
        column = [None if v == "" else v for v in self.column(name)]
        out = np.full(len(self), -1, dtype=np.int64)
        some = [i for i, v in enumerate(column) if v is not None]
        if some:
            scale = values.UNITS[unit]
            out[some] = self.parse(name, lambda v: values.times(v, scale), [column[i] for i in some], some)
        return out

    def labels(self, name: str) -> list[str | None]:
        """Names; numbers are taken as written, empty cells are none."""
        column, out = self.column(name), list[str | None]()
        if set(map(type, column)) == {str} and "" not in column:
            return list(column)
        for row, value in enumerate(column):
            if value is None or value == "":
                out.append(None)
            elif type(value) in (str, int):
                out.append(str(value))
            else:
                raise self.fault(row, f"{name} is {shown(value)}, expected a name")
        return out

    def parse(
        self, name: str, parse: Callable[[Sequence[Any]], T],
        column: Sequence[Any] | None = None, places: Sequence[int] | None = None,
    ) -> T:  # fmt: skip
        """`parse` over a column, its faults told with file and row."""
        try:
            return parse(self.column(name) if column is None else column)
        except BadValue as bad:
            raise self.fault(bad.row if places is None else places[bad.row], f"{name} {bad}") from None


def csv_batches(path: Path, required: Iterable[str], size: int = BATCH) -> Iterator[Batch]:
    """Batches of a csv file with a header; blank lines are skipped. A missing column is one error before any row.

    A last row that has no line end and too few cells was cut off: it is left out and noted.
    """
    with open_text(path) as text:
        lines = Lines(path, text)
        reader = csv.reader(iter(lines), strict=True)
        try:
            header = _header(path, reader, required)
            yield from _csv_body(path, _csv_rows(path, reader, lines), reader, header, lines, size)
        except csv.Error as error:
            raise TraceError(f"{path}: line {reader.line_num}: {error}") from error


def _header(path: Path, reader: Any, required: Iterable[str]) -> list[str]:
    header = [name.strip() for name in next((row for row in reader if not _is_blank(row)), [])]
    missing = [name for name in required if name not in header]
    if missing:
        raise TraceError(f"{path}: no column {listed(missing)}; found {listed(header) or 'an empty file'}")
    if len(set(header)) < len(header):
        raise TraceError(f"{path}: two columns of one name in {listed(header)}")
    return header


def _is_blank(cells: Sequence[str]) -> bool:
    return not cells or (len(cells) == 1 and (not cells[0] or cells[0].isspace()))


def _csv_rows(path: Path, reader: Any, lines: Lines) -> Iterator[list[str]]:
    """The rows of a reader, without one that is cut off within a quoted cell of the last line, which is noted."""
    done = reader.line_num
    try:
        for row in reader:
            yield row
            done = reader.line_num
    except csv.Error:
        if not lines.torn or reader.line_num > done + 1:
            raise
        note_cut(f"{path}: ends within line {reader.line_num}; read up to the line above")


def _csv_body(
    path: Path, rest: Iterator[list[str]], reader: Any, header: list[str], text: Lines, size: int
) -> Iterator[Batch]:
    first, keys, width = 0, frozenset(header), len(header)
    while rows := list(islice(rest, size)):
        lines: Sequence[int] = range(reader.line_num - len(rows) + 1, reader.line_num + 1)
        if set(map(len, rows)) != {width}:
            whole = [(n, row) for n, row in zip(lines, rows, strict=True) if not _is_blank(row)]
            if text.torn and first + len(whole) > 1 and len(whole[-1][1]) < width:
                note_cut(ended_within(path, first + len(whole) - 1, whole[-1][0]))
                del whole[-1]
            lines, rows = [n for n, _ in whole], [row for _, row in whole]
            for i, row in enumerate(rows):
                if len(row) != width:
                    raise at_row(path, first + i, lines[i], f"{len(row)} cells, expected {width}")
        if rows:
            columns = dict(zip(header, zip(*rows, strict=True), strict=True))
            yield Batch(path, first, lines, columns.__getitem__, keys)
            first += len(rows)


def json_batches(path: Path, required: Iterable[str], size: int = BATCH) -> Iterator[Batch]:
    """Batches of a file of one JSON object a line; blank lines are skipped.

    A last line that has no end and is no JSON was cut off: it is left out and noted.
    """
    required, first, line = frozenset(required), 0, 1
    with open_text(path) as text:
        source = Lines(path, text)
        rest = iter(source)
        while chunk := list(islice(rest, size)):
            if not first:
                _refuse_array(path, next((content for content in chunk if not content.isspace()), ""))
            lines: Sequence[int] = range(line, line + len(chunk))
            line += len(chunk)
            if any(map(str.isspace, chunk)):
                lines = [n for n, content in zip(lines, chunk, strict=True) if not content.isspace()]
                chunk = [content for content in chunk if not content.isspace()]
            if source.torn and first + len(chunk) > 1 and _is_cut(chunk[-1]):
                note_cut(ended_within(path, first + len(chunk) - 1, lines[-1]))
                lines, chunk = lines[:-1], chunk[:-1]
            if chunk:
                yield _json_batch(path, first, lines, chunk, required)
                first += len(chunk)


def nested(record: Mapping[str, Any], name: str) -> Any:
    """The value of a key, or of a path of keys joined by dots through objects and lists; None where there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if type(value) is list and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif type(value) is dict:
            value = value.get(part)
        else:
            return None
    return value


def _json_batch(path: Path, first: int, lines: Sequence[int], chunk: list[str], required: frozenset[str]) -> Batch:
    records = _plain_objects(chunk)
    if records is None:  # one by one, to find the row at fault
        records = [parse_object(path, first + i, lines[i], text) for i, text in enumerate(chunk)]
    for i, record in enumerate(records):
        if not required <= record.keys() and (lacking := [n for n in required if nested(record, n) is None]):
            missing = listed(sorted(lacking))
            raise at_row(path, first + i, lines[i], f"no key {missing}; found {listed(record) or 'none'}")
    keys = frozenset().union(*records)

    def column(name: str) -> list[Any]:
        if "." in name and name not in keys:
            return [nested(record, name) for record in records]
        return [record.get(name) for record in records]

    return Batch(path, first, lines, column, keys)


_scan: Callable[[str, int], tuple[Any, int]] = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]
"""The C scanner behind `json.loads`, which spends as long on a short line around it as in it."""


def _plain_objects(lines: list[str]) -> list[dict[str, Any]] | None:
    """The objects of lines that each hold one and end with it; None if any line holds anything else."""
    try:
        decoded = [_scan(line, 0) for line in lines]
    except (StopIteration, ValueError, RecursionError):
        return None
    records, ends = zip(*decoded, strict=True)
    whole = ends == tuple(map(len, map(str.rstrip, lines)))
    return list(records) if whole and set(map(type, records)) == {dict} else None


def _is_cut(text: str) -> bool:
    """Whether a last line is the beginning of an object."""
    return text.lstrip().startswith("{") and _plain_objects([text]) is None


def _refuse_array(path: Path, head: str) -> None:
    if head.lstrip().startswith("["):
        remedy = "jq -c '.[]' FILE writes it so; conversations are read as they are by format=sharegpt"
        raise TraceError(f"{path}: is one JSON array, expected one object a line ({remedy})")


def json_lines(path: Path) -> list[tuple[int, str]]:
    """Number and text of every line that is not blank, but for a last one that was cut off, which is noted."""
    with open_text(path) as text:
        source = Lines(path, text)
        lines = [(n, line) for n, line in enumerate(source, 1) if not line.isspace()]
    if source.torn and len(lines) > 1 and lines[0][1].rstrip().endswith("}") and _is_cut(lines[-1][1]):
        note_cut(ended_within(path, len(lines) - 1, lines[-1][0]))
        del lines[-1]
    return lines


def to_last_whole_row(read: Callable[[], Trace], strict: bool) -> Trace:
    """What `read` reads; if a file ended within a row, with a warning and a count, or an error if `strict`."""
    with collected_cuts() as cuts:
        trace = read()
    if cuts and strict:
        raise TraceError(f"{cuts[0]}; strict forbids it")
    for cut in cuts:
        warnings.warn(cut, stacklevel=3)
    return trace.counted(cut_short_at_the_end=len(cuts))


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line and object of a file of one object a line, or of one object over many lines."""
    lines = json_lines(path)
    if lines and lines[0][1].strip() == "{":
        lines = [(1, "".join(text for _, text in lines))]
    for row, (line, text) in enumerate(lines):
        yield line, parse_object(path, row, line, text)


def parse_object(path: Path, row: int, line: int, text: str) -> dict[str, Any]:
    """One JSON object, or the error for its row."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise at_row(path, row, line, f"not JSON: {error}") from None
    if type(record) is not dict:
        raise at_row(path, row, line, f"a JSON {type(record).__name__}, expected an object")
    return record


def first_record(path: Path) -> Mapping[str, Any]:
    """The first record of a JSON-lines or csv file, with its keys, to tell the format by."""
    with open_text(path) as text:
        head = _first_line(text)
        if not head:
            raise TraceError(f"{path}: is empty")
        _refuse_array(path, head)
        if head.lstrip().startswith("{"):
            whole = head if head.strip() != "{" else head + text.read()  # one object over many lines
            return parse_object(path, 0, 1, whole)
        try:
            header, row = next(csv.reader([head])), next(csv.reader([_first_line(text)]), [])
        except csv.Error as error:
            raise TraceError(f"{path}: line 1: {error}") from None
        return dict(zip([name.strip() for name in header], row + [""] * len(header), strict=False))


def _first_line(text: IO[str]) -> str:
    return next((line for line in text if not line.isspace()), "")
