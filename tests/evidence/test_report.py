"""`schedlab report`: one file that needs nothing else and says what the files say."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from xml.etree import ElementTree

import made_up
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import FCFS, chunked, run_planted

from schedlab.experiments.analysis import report_plots
from schedlab.experiments.analysis.report import HtmlReport, bounds, variants, write_report, written
from schedlab.experiments.analysis.report_answers import SLOWEST
from schedlab.experiments.analysis.statistics import interval
from schedlab.experiments.analysis.step_work import machine_of, step_work
from schedlab.experiments.analysis.table import FIGURES, Figure, Run
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.reader import read_run

VOID = {"meta", "br", "img", "hr", "link", "input", "source"}


def small(policy):
    def make(draw):
        return {
            "policy": policy,
            "workload.num_requests": 40,
            "workload.arrivals.rate": 20.0,
            "workload.lengths.output": [20, 60],
        }

    return make


VERDICTS = {"answers": [{
    "condition": "", "variant": "ChunkedPrefill", "baseline": "FCFS", "pairs": 9, "refused": None,
    "findings": [{"metric": "itl/p99", "primary": True, "scale": "ratio", "change": -0.25, "low": -0.3, "high": 12.0,
                  "level": 0.95, "p_holm": 0.0125, "verdict": "inconclusive", "needed": 1234}],
}], "gates": []}  # fmt: skip


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two policies with two replicates each, as a sweep leaves them."""
    directory = tmp_path_factory.mktemp("sweep")
    for job, (policy, seed) in enumerate([(FCFS, 0), (FCFS, 1), (chunked(256), 0), (chunked(256), 1)]):
        run_planted(small(policy), seed, directory / str(job))
        path = directory / str(job) / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["labels"] |= {"policy": policy["_target_"].rpartition(".")[2], "seed": seed + 1}
        path.write_text(json.dumps(manifest))
    (directory / "verdicts.json").write_text(json.dumps(VERDICTS))
    return directory


@pytest.fixture(scope="module")
def written_report(sweep):
    path, pictures = write_report(sweep, tried=False)
    return path.read_text(), pictures


class Balanced(HTMLParser):
    """Fails on a tag that closes what is not open."""

    def __init__(self):
        super().__init__()
        self.open, self.words = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data.strip())


def test_it_needs_nothing_else(written_report):
    text, _ = written_report
    assert not re.search(r"<script|<link|<img|<iframe|@import|src=", text)
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert {address for address in addresses if "w3.org" not in address} == set()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []


def test_it_says_what_the_files_say(sweep, written_report):
    parser = Balanced()
    parser.feed(written_report[0])
    shown = set(parser.words)
    found = variants([Run(sweep / str(job), read_run(sweep / str(job))) for job in range(4)])
    assert [(variant.name, len(variant.runs)) for variant in found] == [("FCFS", 2), ("ChunkedPrefill", 2)]
    for figure in FIGURES:
        for variant in found:
            values = [run.figures[figure.key] for run in variant.runs]
            assert None in values or written(figure, values) in shown, figure
    assert {"Summary", "Latencies", "Stalls", "TTFT against TPOT", "Fairness", "Manifest"} <= shown
    assert {"own prefill", "own decode"} <= shown
    assert any(words.endswith("All requests are of one client.") for words in shown)


def test_pictures_are_there_as_png_and_svg_with_units(sweep, written_report):
    text, paths = written_report
    report = HtmlReport(sweep)
    sections = [*report.sections, *(report.of_variant(variant) for variant in report.drawn)]
    pictures = {name: figure for section in sections for name, figure in section.pictures.items()}
    assert {path.stem for path in paths} == set(pictures) and text.count("<svg ") == len(pictures)
    for path in paths:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        else:
            assert path.read_bytes().startswith(b"\x89PNG")
    counts = {"requests", "client", ""}
    for name, figure in pictures.items():
        words = [axis.get_xlabel() for axis in figure.axes] + [axis.get_ylabel() for axis in figure.axes]
        words += [figure.get_supylabel()]
        assert any("(" in word for word in words), name
        assert all(re.search(r"\(.+\)", word) or word in counts for word in words), (name, words)


def test_verdicts_are_shown_where_there_are_any(sweep, written_report):
    for words in ("-25.0%", "-30.0% … 13.0×", "0.0125", "inconclusive (about 1,234 replicates needed)", "9 pairs"):
        assert words in written_report[0]
    assert HtmlReport(sweep / "0").verdicts() is None
    (sweep / "0" / "verdicts.json").write_text("{")
    with pytest.raises(ConfigError, match=r"verdicts.json: not JSON"):
        HtmlReport(sweep / "0").verdicts()


def test_the_first_screen_answers_and_every_link_leads_to_its_place(written_report):
    text, _ = written_report
    screen = text[: text.index('id="summary"')]
    assert "It is open whether ChunkedPrefill or FCFS is better: ITL p99 -25.0%" in screen
    targets = set(re.findall(r'id="(\w+)"', text))
    assert set(re.findall(r'href="#(\w+)"', text)) <= targets and {"w1", "w2"} <= targets
    assert text.count('class="life"') == 2 * SLOWEST


def test_without_verdicts_beside_it_a_sweep_is_judged_and_its_requests_are_one_click_away(sweep, tmp_path):
    for job in range(4):
        shutil.copytree(sweep / str(job), tmp_path / str(job))
    report = HtmlReport(tmp_path)
    (answer,) = report.judged()["answers"]
    assert (answer["variant"], answer["baseline"], answer["pairs"]) == ("ChunkedPrefill", "FCFS", 2)
    assert [report.place(name, "") for name in ("FCFS", "ChunkedPrefill", "other")] == [1, 2, None]
    assert HtmlReport(sweep / "1").judged() is None


def test_what_cannot_be_paired_is_shown_all_the_same(sweep, tmp_path):
    for job in (0, 2):
        shutil.copytree(sweep / str(job), tmp_path / str(job))
        for stored in (tmp_path / str(job)).glob("workload.jsonl*"):
            stored.unlink()
    path, _ = write_report(tmp_path, tried=False)
    assert "<p>Nothing is judged: " in path.read_text()


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, and a Chromium")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a Chromium: none of {', '.join(BROWSERS)} is there")
    with sync_api.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_overflow_or_complaint(browser, sweep, written_report, width, scheme):
    told = []
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.goto((sweep / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shades = page.evaluate("['color', 'backgroundColor'].map(of => getComputedStyle(document.body)[of])")
    text, behind = (sum(map(int, re.findall(r"\d+", shade)[:3])) for shade in shades)
    assert abs(text - behind) > 500 and (text > behind) == (scheme == "dark")
    first = page.evaluate("document.querySelector('.answers').getBoundingClientRect().bottom")
    assert first < 800 and told == []
    page.click("a[href='#w1']")
    assert abs(page.evaluate("document.querySelector('#w1').getBoundingClientRect().top")) < 800
    page.close()


def test_a_run_without_logs_has_no_report(tmp_path):
    made_up.run(tmp_path, record="summary")
    with pytest.raises(ConfigError, match="expected a run with logs"):
        write_report(tmp_path)
    made_up.run(tmp_path, requests=0)
    with pytest.raises(ConfigError, match=r"with logs .* and finished requests, found none"):
        write_report(tmp_path)


def test_the_front_has_nobody_that_another_beats_in_both():
    figure = report_plots.pareto({"a": [(1.0, 4.0)], "b": [(2.0, 2.0)], "worse": [(3.0, 3.0)], "c": [(4.0, 1.0)]})
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1e3, 4e3], [2e3, 2e3], [4e3, 1e3]]


@given(st.lists(st.floats(0.01, 0.99), min_size=2, max_size=15))
def test_an_interval_stays_where_its_values_can_be(values):
    values = np.array(values)
    low, high = bounds(values, Figure("slo/attainment", "SLO met", ".1%"))
    assert 0 <= low <= high <= 1
    low, high = bounds(values, Figure("ttft/mean", "TTFT", ".1f"))
    logs = interval(np.log(values))
    assert (low, high) == pytest.approx((np.exp(logs.low), np.exp(logs.high))) and low > 0
    capped = bounds(np.append(values, 1.0), Figure("slo/attainment", "SLO met", ".1%"))
    assert 0 <= capped[0] <= capped[1] <= 1


def test_no_step_is_above_the_roofline(sweep):
    run = read_run(sweep / "2")
    line, machine = machine_of(run.manifest)
    work = step_work(run, line)
    peak = np.minimum(machine.peak_flops(("bf16",)), machine.peak_bandwidth("memory") * work.flops / work.bytes)
    assert len(work.flops) and (work.flops / work.seconds < peak).all()
    assert (work.prompts | work.streams).all()
