"""Makes docs/study.ipynb of docs/study.md: its python blocks are the cells, in order, and the text between them.

`python docs/notebook.py` writes it; a test holds that both are the same.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("study.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> dict[str, Any]:
    """The content of an .ipynb; text and code take turns."""
    cells = [cell(place, text.strip()) for place, text in enumerate(BLOCK.split(page))]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": [c for c in cells if c["source"]], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def cell(place: int, text: str) -> dict[str, Any]:
    common = {"id": f"cell-{place}", "metadata": {}, "source": text.splitlines(keepends=True)}
    if place % 2:
        return {"cell_type": "code", "execution_count": None, "outputs": [], **common}
    return {"cell_type": "markdown", **common}


def text_of(page: Path = PAGE) -> str:
    return json.dumps(notebook(page.read_text(encoding="utf-8")), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(text_of(), encoding="utf-8")
