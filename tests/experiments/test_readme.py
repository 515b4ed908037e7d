"""The figures of README.md, of docs/ and of the pages they link.

What needs only modelled time and traffic that is drawn is made again and must read as printed; what was measured must
be there in its form, in a range that it can have, with the command that measures it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from schedlab.experiments.bench import stall_picture
from schedlab.experiments.run import compose
from schedlab.experiments.studies import leaderboard, reproduce, reproduce_result
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.workload import Recorded

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {path.stem: path.read_text(encoding="utf-8").replace("](../", "](") for path in (ROOT / "docs").glob("*.md")}
EVERYTHING = "\n".join([README, *DOCS.values()])
FLAT = " ".join(EVERYTHING.split())
"""Without line breaks, which may fall anywhere."""
TRACES = ROOT.parent / "shared" / "traces"
PICTURES = {
    "experiments/bench/results/stall.png": "python -m schedlab.experiments.bench.stall_picture",
    "experiments/bench/results/azure_hour.png": "`hour/plots/latency_cdf.png` of the sweep below",
}
"""And what regenerates them, as the text says it."""
PAGES = {
    "experiments/bench/results/reproductions.md": "schedlab reproduce",
    "experiments/bench/results/leaderboard.md": "schedlab bench",
    "experiments/bench/results/policy_mutants.md": "python -m schedlab.experiments.bench.mutate_policies",
    "experiments/bench/results/fidelity.md": "schedlab fidelity",
    "experiments/bench/results/truth/truth.md": "python -m schedlab.experiments.bench.truth",
}
MEASURED = {
    r"`schedlab kernels build` .* `engine=cpu` about (twice) as fast": "cpu_engine",
    r"([\d.]+) to ([\d.]+) times transformers' `generate` when decoding": "cpu_engine",
    r"([\d.]+) times on a mixed batch of 32": "cpu_engine",
    r"at (two) to (four) times the time": "batch_invariant",
    r"each policy in (seconds)": "virtual_clock",
}
"""Patterns of what depends on the machine, and the module of `schedlab.experiments.bench` that measures it."""
LITERATURE = [name for name in reproduce.NAMES if name != "prefix_order"]  # of which one run takes a quarter minute


def test_every_picture_and_page_is_there_with_the_command_that_makes_it():
    assert set(re.findall(r"!\[.*?\]\((.*?)\)", EVERYTHING)) == set(PICTURES)
    assert set(PAGES) == set(re.findall(r"\]\((\S+results/\S+\.md)\)", EVERYTHING))
    for file, told in (PICTURES | PAGES).items():
        assert (ROOT / file).stat().st_size > 1000 and told in FLAT, file


def test_the_clock_s_errors_are_the_first_row_of_their_page():
    page = (ROOT / "experiments/bench/results/truth/truth.md").read_text(encoding="utf-8")
    heads, whole = (next(line for line in page.splitlines() if line.startswith(start)) for start in ("| rows", "| all"))
    cells = dict(zip(heads.split(" | ")[2:], whole.strip("| ").split(" | ")[2:], strict=True))
    for way in ("preset", "preset + serving", "imported + serving"):
        row = [cells[f"{metric}, {way}"] for metric in ("TPOT", "TTFT")]
        assert f"| {way} | {' | '.join(row)} |" in README


def test_the_longest_stalls_are_as_printed():
    whole, chunked = stall_picture.run(FCFS()), stall_picture.run(ChunkedPrefill())
    stalls = [round(1e3 * stall) for stall in stall_picture.stalls_s(whole)]
    assert len(set(stalls)) == 1 and f"every stream stalls for {stalls[0]} ms" in FLAT
    assert f"the longest stall is {1e3 * max(stall_picture.stalls_s(chunked)):.0f} ms" in FLAT
    first, later = (stall_picture.ttft_s(stall_picture.in_order(past)[-1]) for past in (whole, chunked))
    assert f"the prompt's first token comes {later - first:.2f} s later" in FLAT


def test_the_policies_that_ship_are_those_in_the_table(workspace):
    with hydra.initialize_config_module(compose.CONFIG_MODULE, version_base="1.3"):
        ship = leaderboard.installed_policies(GlobalHydra.instance().config_loader())
    table = DOCS["policies"].split("## Policies that ship")[1].split("\n\n")[1]
    assert {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])} == set(ship)


def test_the_number_of_reproductions_is_as_printed():
    assert "Eight results of the literature are overlays" in FLAT and len(reproduce.NAMES) == 8


@pytest.mark.parametrize("name", LITERATURE)
def test_a_row_of_the_literature_is_as_printed(name):
    """The first of each; all of them, and what is concluded, with --full."""
    page = (ROOT / "experiments/bench/results/reproductions.md").read_text()
    facts = compose.resolve(compose.compose([f"experiment={name}"]))["reproduction"]
    label, point, words = next(reproduce.planned(facts))
    run = reproduce_result.ReproducedRun(label, point, words, reproduce.run_words(name, words))
    assert reproduce_result.row(run, reproduce_result.SHOWN[name]) in page.split(f"## {facts['title']}")[1]


@pytest.mark.full
def test_the_page_of_the_literature_is_as_printed():
    page = (ROOT / "experiments/bench/results/reproductions.md").read_text()
    done = [reproduce.reproduce_one(name) for name in reproduce.NAMES]
    assert reproduce_result.markdown(done, "reproductions.png") == page


@pytest.mark.parametrize("pattern", MEASURED)
def test_what_was_measured_is_said_with_its_command(pattern):
    found = re.search(pattern, FLAT)
    assert found, pattern
    numbers = [float(word) for word in found.groups() if re.fullmatch(r"[\d.]+", word or "")]
    assert numbers == sorted(numbers) and all(1 < number < 10 for number in numbers)
    module = f"schedlab.experiments.bench.{MEASURED[pattern]}"
    assert f"python -m {module}" in FLAT and importlib.util.find_spec(module) is not None


def test_the_azure_hour_has_as_many_requests():
    file = TRACES / "azure-2023/AzureLLMInferenceTrace_conv.csv.gz"
    if not file.exists():
        pytest.skip("the published traces are not at ../shared/traces")
    trace = Recorded(name="azure_conv", path=str(file), format="azure").load(0)
    assert f"{len(trace):,} requests of Azure's 2023 conversation hour" in FLAT


def pages_with_links() -> list[Path]:
    folders = ("docs", "workloads", "experiments/bench/results")
    return [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Of its headings, as Markdown's tools make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere():
    for page in pages_with_links():
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            there = page.parent / file if file else page
            assert there.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(there), f"{page}: {target}"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_policy_of_the_first_page_runs(schedlab):
    Path("mine.py").write_text(next(block for block in blocks("python") if block.startswith("# mine.py")))
    (command,) = re.findall(r"^schedlab (run policy=custom \S+ \S+)$", README, re.MULTILINE)
    done = schedlab(*command.split(), "engine=stub", "wandb.mode=disabled", "plots=false", "progress=false")
    assert done.code == 0 and "TTFT p99 ms" in done.out, done.err


def test_the_run_from_python_is_as_printed(tmp_path):
    """Its first part; the second needs a model that is fetched."""
    code = next(block for block in blocks("python") if "schedlab.run(" in block).split("llm = ")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert re.fullmatch(r"0\.\d+ [0-9a-f]{32}\n", done.stdout), done.stderr
