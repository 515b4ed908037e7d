"""The tables of docs/ against what they describe: what a policy may read and do, what it hears, what is measured."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

import schedlab as lab
from schedlab import engines
from schedlab.framework.policy import Event
from schedlab.framework.predictors import OraclePredictor
from schedlab.framework.results.groups import GROUP_FIGURES, TURNED_AWAY
from schedlab.framework.results.metrics import SUMMARY_KEYS
from schedlab.framework.results.tables import SCHEMAS
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.populations import CommonWork

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITING = (DOCS / "writing_policies.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The cells of every row, headings left out."""
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in text.splitlines() if row.startswith("| `")]


@pytest.mark.parametrize("kind", [lab.Request, lab.Step], ids=lambda kind: kind.__name__)
def test_every_member_has_a_row_with_its_unit(kind):
    rows = table(section(WRITING, f"`{kind.__name__}`"))
    names = [re.match(r"`(\w+)", row[0]).group(1) for row in rows]
    assert sorted(names) == [name for name in sorted(dir(kind)) if not name.startswith("_")]
    assert all(len(row) == 3 and row[2] for row in rows)
    without = [] if kind is lab.Request else ["`reject(r, reason)`", "`close()`"]
    assert [row[0] for row in rows if not row[1]] == without


def test_every_event_has_a_row_with_its_fields():
    told = {re.match(r"`(\w+)`", name).group(1): words for name, words in table(section(WRITING, "`Policy`"))}
    assert set(told) == {kind.__name__ for kind in get_args(Event)}
    for kind in get_args(Event):
        assert [f.name for f in fields(kind) if f"`{f.name}`" not in told[kind.__name__]] == []


def test_the_policies_of_the_pages_run():
    pages = WRITING + (DOCS / "ten_minutes.md").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for text in re.findall(r"^```python \w+\.py\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL):
        exec(text, found)
    for name in ("OneByOne", "SRTF", "ShortestFirst"):
        done = lab.run(found[name](), CommonWork(num_requests=20), engines.stub(), predictor=OraclePredictor())
        assert done.summary["requests/finished"] == 20


def keys_of_rows() -> list[str]:
    rows = METRICS.split("## Where a run has more")[0]
    return [key for row in table(rows) for key in re.findall(r"`([\w/…]+)`", row[0])]


def test_every_metric_has_one_row_and_every_row_a_metric():
    latencies = [key.removesuffix("…") for key in keys_of_rows() if key.endswith("…")]
    told = [key for key in SUMMARY_KEYS if key.startswith(tuple(latencies))]
    told += [key for key in keys_of_rows() if not key.endswith("…")]
    assert sorted(told) == sorted(SUMMARY_KEYS)
    assert all(row[1] for row in table(METRICS.split("## Where a run has more")[0]))


def test_the_figures_of_parts_are_told():
    more = METRICS.split("## Where a run has more")[1]
    assert [name for name in GROUP_FIGURES if f"`{name}`" not in more] == []
    assert [reason for reason in TURNED_AWAY if f"`requests/{reason}`" not in more] == []


def test_columns_and_vllm_s_names_exist(tmp_path):
    lab.run(FCFS(), CommonWork(num_requests=5), engines.stub(), out=tmp_path)
    theirs = json.loads((tmp_path / "vllm_bench.json").read_text())
    for row in table(METRICS.split("## Where a run has more")[0]):
        log = re.match(r"`(\w+)`: ", row[3])
        if log is not None:
            columns = re.findall(r"`(\w+)`", row[3].split(": ", 1)[1])
            assert [name for name in columns if name not in SCHEMAS[log.group(1)]] == [], row
        names = [name for name in re.findall(r"`([\w:]+)`", row[4]) if not name.startswith("vllm:")]
        assert [name for name in names if name not in theirs] == [], row


# ---- the site ----


def test_every_page_and_every_name_of_the_site_exists():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    told = re.findall(r"[\w/]+\.md", nav)
    assert len(told) > 20 and all((ROOT / page).exists() for page in told)
    names = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) > 10 and all(pkgutil.resolve_name(name) is not None for name in names)


@pytest.mark.full
def test_the_site_is_built_without_a_warning():
    pytest.importorskip("mkdocstrings", reason="needs schedlab[docs]")
    words = ["make", "-o", f"{sys.prefix}/.installed", "docs", "PIP=true", f"VENV={sys.prefix}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "build/site/docs/api.html").read_text(encoding="utf-8")
    assert "schedlab.framework.step.Step.grant_decodes" in page
