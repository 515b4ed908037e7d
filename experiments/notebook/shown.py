"""What every result offers: rows, data frames, a picture, and a small table where a notebook shows it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from schedlab.framework.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 20
"""Of a table that a notebook shows; data frames have them all."""
Row = Mapping[str, Any]


class Shown:
    """A result as rows of plain values. A subclass gives `rows`, and `picture` where there is one to draw; it computes
    nothing that a command would not."""

    def rows(self) -> Sequence[Row]:
        raise NotImplementedError

    def picture(self) -> Figure:
        raise ConfigError(f"{type(self).__name__}.figure: there is no picture of this result")

    def table(self) -> Sequence[Row]:
        """What a notebook shows: the rows, unless there is a shorter way to put them."""
        return self.rows()

    def to_pandas(self) -> Any:
        """A pandas.DataFrame of `rows`. ConfigError where pandas is not installed."""
        return frame("pandas", list(map(dict, self.rows())))

    def to_polars(self) -> Any:
        """A polars.DataFrame of `rows`. ConfigError where polars is not installed."""
        return frame("polars", list(map(dict, self.rows())))

    def figure(self) -> Figure:
        """A matplotlib figure with axis names and units, which a notebook shows without further ado."""
        return visible(self.picture())

    def _repr_html_(self) -> str:
        return html(self.table())


def frame(library: str, data: Any) -> Any:
    """A DataFrame of rows or columns by `library`."""
    try:
        module: Any = __import__(library)
    except ImportError:
        raise ConfigError(f"to_{library}: expected the package {library}; pip install schedlab[{library}]") from None
    more = {"infer_schema_length": None} if library == "polars" else {}
    return module.DataFrame(data, **more)


def visible(figure: Figure) -> Figure:
    """`figure`, which a notebook draws: one that was made without pyplot has no format of its own there."""
    figure.__dict__["_repr_png_"] = partial(png, figure)
    return figure


def png(figure: Figure) -> bytes:
    held = io.BytesIO()
    figure.savefig(held, dpi=100, format="png")
    return held.getvalue()


def html(rows: Sequence[Row], most: int = MOST_ROWS) -> str:
    """A plain table of the first rows, and how many more there are."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{escape(key)}</th>" for key in keys)
    body = "".join(f"<tr>{''.join(cell(row.get(key)) for key in keys)}</tr>" for row in rows[:most])
    more = f"<p>{len(rows) - most:,} more rows</p>" if len(rows) > most else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def cell(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = "–" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
    return f'<td style="text-align:{"right" if number else "left"}">{escape(text)}</td>'
