"""How true the virtual clock is: published server runs beside what it says of them.

    python -m schedlab.experiments.bench.truth --measurements DIR --out DIR [--tables DIR] [--only vllm] [--limit N]

DIR of measurements has silicon_sample.csv, 5,221 server runs out of aiconfigurator-core, and llmservingsim/, stamps of
single requests; DIR of tables is where aiconfigurator-core was installed. Every run that can be modelled is run three
times: by the preset of its card, with the host constants of its server, and with these by the profile imported for its
model, card, dtype and split. The rest is counted by reason.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import schedlab
from schedlab.experiments import engines
from schedlab.experiments.run import compose
from schedlab.experiments.studies.profile_import import imported, open_source
from schedlab.framework.cost.fit import Profile
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.errors import ConfigError
from schedlab.framework.stages import ClientView, Stage
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.workloads.lengths import Fixed, Uniform
from schedlab.workloads.sessions import ClosedLoop, ThinkTime
from schedlab.workloads.trace import Trace
from schedlab.workloads.workload import Offered

MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b", "nvidia/Llama-3.1-8B-Instruct-FP8": "llama3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama3.1-70b", "Qwen/Qwen3-32B": "qwen3-32b", "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b", "openai/gpt-oss-120b": "gpt-oss-120b",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
}  # fmt: skip
DTYPES = {"": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}
WAYS = ("preset", "preset + serving", "imported + serving")
METRICS = ("tpot", "ttft", "e2e")
BUDGET = 8192
"""Tokens of a step: the servers' default on these cards."""
ROUNDS = 3
"""Requests that each user of a closed loop sends."""
PLAUSIBLE = 0.6
"""A run whose output alone needs a larger share of the card's peak FLOP/s is left out: its figures cannot be true."""


@dataclass(frozen=True)
class Row:
    """One published run that can be modelled. Times are in seconds, `ttft_s` and `tpot_s` measured."""

    id: str
    model: str
    hardware: str
    backend: str
    dtype: str
    tensor_parallel: int
    expert_parallel: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    random_lengths: bool
    ttft_s: float
    tpot_s: float

    @property
    def e2e_s(self) -> float:
        return self.ttft_s + self.tpot_s * (self.output_tokens - 1)


def rows(path: Path) -> tuple[list[Row], Counter[str]]:
    """The runs that can be modelled, and how many of the others for which reason."""
    kept, left = [], Counter[str]()
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open() as file:
        for line in csv.DictReader(file):
            reason = why_not(line)
            if reason is None:
                kept.append(row_of(line))
                continue
            left[reason] += 1
    return kept, left


def why_not(line: Mapping[str, str]) -> str | None:
    """Why a run cannot be modelled; None if it can."""
    if line["mode"] != "agg":
        return "prefill and decode on separate devices"
    if line["model_path"] not in MODELS:
        return f"model {line['model_path'].rpartition('/')[2]}"
    if int(float(line["pp_size"])) > 1 or int(float(line["attention_dp_size"] or 1)) > 1:
        return "pipeline or data parallel"
    if has_experts(line["model_path"]) and split_of(line) is None:
        return "experts both sliced and spread"
    hardware = line["system"].removesuffix("_sxm")
    if hardware not in ("h100", "h200", "b200", "gb200", "b300", "a100", "l40s"):
        return f"card {line['system']}"
    if line["gemm_quant_mode"] not in DTYPES:
        return f"dtype {line['gemm_quant_mode']}"
    return "implausible: more than 60 % of the peak" if implausible(row_of(line)) else None


def has_experts(model_path: str) -> bool:
    return bool(shape(MODELS[model_path]).num_experts)


def split_of(line: Mapping[str, str]) -> int | None:
    """Devices that whole experts are spread over, 1 where each holds a slice of all; None for both at once."""
    devices, sliced, spread = (int(float(line[name] or 1)) for name in ("tp_size", "moe_tp_size", "moe_ep_size"))
    return spread if (sliced, spread) in ((devices, 1), (1, devices)) else None


def row_of(line: Mapping[str, str]) -> Row:
    model = MODELS[line["model_path"]]  # a dtype of its experts' own is the only one below 16 bits in it
    return Row(
        line["id"], model, line["system"].removesuffix("_sxm"), line["backend"],
        "bf16" if shape(model).expert_dtype else DTYPES[line["gemm_quant_mode"]], int(float(line["tp_size"])),
        (split_of(line) or 1) if has_experts(line["model_path"]) else 1,
        int(line["isl"]), int(line["osl"]), int(float(line["batch_size"])),
        line["silicon_data_source"].startswith("source_file=2026"), float(line["silicon_ttft_ms"]) / 1e3,
        float(line["silicon_tpot_ms"]) / 1e3,
    )  # fmt: skip


def implausible(row: Row) -> bool:
    """By the FLOPs of all tokens over the time that a request takes, of `concurrency` at once."""
    roofline = Roofline(shape(row.model), row.dtype, "bf16", row.tensor_parallel, row.expert_parallel)
    work = Work(tokens=row.prompt_tokens + row.output_tokens)
    flops = roofline.linears(work).flops + roofline.experts(work).flops
    arithmetic = (row.dtype,) if row.dtype in ("fp8", "fp4") else ()
    peak = machine(row.hardware, "none").peak_flops((*arithmetic, "bf16"))
    return flops * row.concurrency / row.e2e_s > PLAUSIBLE * peak


@cache
def shape(model: str) -> Any:
    return engines.model_preset(model)[0]


@cache
def machine(name: str, serving: str) -> Hardware:
    return engines.hardware_preset(name, serving)


@cache
def profile_of(model: str, hardware: str, dtype: str, degree: int, spread: int, backend: str, tables: str) -> Profile:
    roofline = Roofline(shape(model), dtype, "bf16", degree, spread)
    kernels = open_source("aiconfigurator", roofline, machine(hardware, backend), tables, backend)
    return imported(kernels, roofline, machine(hardware, backend))


def modelled(row: Row, hardware: Hardware, profile: Profile | None, view: ClientView | None = None) -> dict[str, float]:
    """Mean TTFT, TPOT and end-to-end seconds of the row's traffic on the virtual clock.

    Users begin one after another within about one request's time: by the servers' TTFT their prompts came apart.
    """
    prompt, output = row.prompt_tokens, row.output_tokens
    lengths = (
        Uniform([int(0.8 * prompt), prompt], [int(0.8 * output), output])
        if row.random_lengths
        else Fixed(prompt, output)
    )
    engine = engines.virtual(
        row.model, hardware, weight_dtype=row.dtype, kv_cache_dtype="bf16", tensor_parallel=row.tensor_parallel,
        expert_parallel=row.expert_parallel, profile=profile, max_num_seqs=max(row.concurrency, 1),
        max_num_batched_tokens=BUDGET, max_model_len=20_480,
    )  # fmt: skip
    step = engine.executor.decode_cost(row.concurrency)  # type: ignore[attr-defined]
    whole_s = output * step.duration_ns(row.concurrency * (prompt + output // 2)) / 1e9
    work = ClosedLoop(
        users=row.concurrency, num_requests=row.concurrency * ROUNDS, lengths=lengths, think=ThinkTime(0.0),
        ramp_s=whole_s,
    )  # fmt: skip
    summary = schedlab.run(ChunkedPrefill(chunk_size=BUDGET), work, engine, observed_at=view).summary
    return {metric: summary[f"{metric}/mean"] for metric in METRICS}


def view_of(serving: str) -> ClientView:
    """The server's share of a client's TTFT."""
    keys = compose.preset("serving", serving)
    return ClientView(Stage(keys["preparation_s"], keys["preparation_per_token_s"]))


def three_ways(row: Row, tables: str | None) -> dict[str, dict[str, float] | str]:
    """What each way says of a row, or why it cannot."""
    plain, served, view = machine(row.hardware, "none"), machine(row.hardware, row.backend), view_of(row.backend)
    found: dict[str, dict[str, float] | str] = {}
    for way in WAYS:
        try:
            if way == "preset":
                found[way] = modelled(row, plain, None)
            elif way == "preset + serving":
                found[way] = modelled(row, served, None, view)
            elif tables is not None:
                split = (row.tensor_parallel, row.expert_parallel)
                profile = profile_of(row.model, row.hardware, row.dtype, *split, row.backend, tables)
                found[way] = modelled(row, served, profile, view)
        except ConfigError as error:
            found[way] = str(error)
    return found


# ---- single requests ----

REPLAYS = {
    "RTX4090_Llama-3.1-8B": ("RTX4090", "rtx4090", 256, 2588),
    "RTXPRO6000_Llama-3.1-8B": ("RTXPRO6000", "rtx_pro_6000", 128, None),
}
"""Recorded requests of a real server: its kernel tables, card, and of its meta.json max_num_seqs and num_gpu_blocks."""


def replay(folder: Path, name: str) -> dict[str, tuple[float, float]]:
    """Mean seconds of TTFT, TPOT and end to end, measured and modelled from the card's own tables."""
    tables, card, seqs, blocks = REPLAYS[name]
    with gzip.open(folder / f"{name}.jsonl.gz", "rt") as file:
        stamps = [json.loads(line) for line in file]
    hardware = machine(card, "vllm_async")
    roofline = Roofline(shape("llama3.1-8b"), "bf16", "bf16", 1)
    profile = imported(open_source("llmservingsim", roofline, hardware, str(folder / tables)), roofline, hardware)
    engine = engines.virtual(
        "llama3.1-8b", hardware, profile=profile, max_num_seqs=seqs, max_num_batched_tokens=2048, max_model_len=32_768,
        num_blocks=blocks,
    )  # fmt: skip
    first = min(stamp["queued_ts"] for stamp in stamps)
    trace = Trace(
        name, np.arange(len(stamps)), np.array([round((s["queued_ts"] - first) * 1e9) for s in stamps]),
        np.array([s["input_toks"] for s in stamps]), np.array([s["output_toks"] for s in stamps]),
    )  # fmt: skip
    order = np.argsort(trace.arrival_ns, kind="stable")
    summary = schedlab.run(ChunkedPrefill(chunk_size=2048), Recorded(trace=trace.take(order)), engine).summary
    measured = {
        "ttft": [s["first_token_ts"] - s["queued_ts"] for s in stamps],
        "tpot": [(s["last_token_ts"] - s["first_token_ts"]) / (s["output_toks"] - 1) for s in stamps],
        "e2e": [s["last_token_ts"] - s["queued_ts"] for s in stamps],
    }
    return {metric: (float(np.mean(measured[metric])), summary[f"{metric}/mean"]) for metric in METRICS}


@dataclass(kw_only=True)
class Recorded(Offered):
    """Requests at their recorded times."""

    trace: Trace
    name: str = "recorded"

    def load(self, seed: int = 0) -> Trace:
        return self.trace


# ---- the page ----

CELLS = ("model", "hardware", "backend", "dtype", "tensor_parallel", "expert_parallel", "concurrency")


@dataclass(frozen=True)
class Judged:
    """Rows with what each way says; relative errors are modelled / measured - 1."""

    rows: Sequence[Row]
    found: Sequence[Mapping[str, dict[str, float] | str]]

    def errors(self, way: str, metric: str, chosen: Iterable[int] | None = None) -> np.ndarray:
        """float64 [rows that the way can model]."""
        picked = range(len(self.rows)) if chosen is None else chosen
        values = [
            says[metric] / getattr(self.rows[i], f"{metric}_s") - 1
            for i in picked if isinstance(says := self.found[i].get(way), dict)
        ]  # fmt: skip
        return np.array(values)


def described(errors: np.ndarray) -> str:
    """Signed median, median and 90th percentile of |error|, in percent."""
    if not len(errors):
        return "–"
    size = np.abs(errors)
    return f"{np.median(errors):+.0%} / {np.median(size):.1%} / {np.quantile(size, 0.9):.0%}"


def tables_of(judged: Judged) -> Iterator[str]:
    """Markdown: all rows, those under vLLM on Hopper, then each value of each cell."""
    heads = [f"{metric.upper()}, {way}" for metric in METRICS for way in WAYS]
    yield "signed median / median / p90 of the error\n"
    yield "| rows | n | " + " | ".join(heads) + " |"
    yield "|---" * (len(heads) + 2) + "|"
    groups: dict[str, list[int]] = {"all": list(range(len(judged.rows)))}
    for cell in CELLS:
        for i, row in enumerate(judged.rows):
            groups.setdefault(f"{cell} {getattr(row, cell)}", []).append(i)
    ordered = ["all", *sorted((name for name in groups if name != "all"), key=natural)]
    hopper = [i for i, row in enumerate(judged.rows) if row.backend == "vllm" and row.hardware in ("h100", "h200")]
    calm = [i for i, row in enumerate(judged.rows) if row.concurrency <= 8]
    bf16 = [i for i, r in enumerate(judged.rows) if r.dtype == "bf16" and r.tensor_parallel == 1]
    sparse = [i for i, row in enumerate(judged.rows) if shape(row.model).num_experts]
    dense = [i for i in groups["all"] if i not in set(sparse)]
    extra = {
        "dense": dense, "dense, vllm on h100 and h200": [i for i in hopper if i in set(dense)],
        "experts": sparse, "experts, vllm on h100 and h200": [i for i in hopper if i in set(sparse)],
        "concurrency ≤ 8": calm, "bf16 on one device": bf16,
    }  # fmt: skip
    for name, chosen in (("all", groups["all"]), *extra.items(), *((name, groups[name]) for name in ordered[1:])):
        cells = [described(judged.errors(way, metric, chosen)) for metric in METRICS for way in WAYS]
        yield f"| {name} | {len(chosen)} | " + " | ".join(cells) + " |"


def natural(name: str) -> tuple[int, str, float, str]:
    cell, _, value = name.partition(" ")
    number = float(value) if value.replace(".", "", 1).isdigit() else 0.0
    return CELLS.index(cell), cell, number, value


def picture(judged: Judged, path: Path) -> None:
    """Modelled against measured TPOT, a panel for each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, way in zip(figure.subplots(1, len(WAYS), sharex=True, sharey=True), WAYS, strict=True):
        for backend in sorted({row.backend for row in judged.rows}):
            pairs = [
                (row.tpot_s * 1e3, says["tpot"] * 1e3)
                for row, found in zip(judged.rows, judged.found, strict=True)
                if row.backend == backend and isinstance(says := found.get(way), dict)
            ]  # fmt: skip
            if pairs:
                axes.scatter(*zip(*pairs, strict=True), s=8, alpha=0.6, label=f"{backend} ({len(pairs)})")
        axes.axline((1, 1), (10, 10), color="grey", linewidth=1)
        axes.set(xscale="log", yscale="log", title=way, xlabel="measured TPOT (ms)", ylabel="modelled TPOT (ms)")
        axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)


def page(judged: Judged, left: Counter[str], replays: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    lines = ["# Published server runs and the virtual clock\n", *tables_of(judged), ""]
    lines += ["## Single requests: mean measured and modelled from the card's own tables\n"]
    lines += ["| run | TTFT s | TPOT ms | E2E s |", "|---|---|---|---|"]
    for name, figures in replays.items():
        scale = {"ttft": 1, "tpot": 1e3, "e2e": 1}
        cells = [
            f"{measured * scale[m]:.2f}, {says * scale[m]:.2f} ({says / measured - 1:+.1%})"
            for m, (measured, says) in figures.items()
        ]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["\n## Runs that cannot be modelled\n", "| reason | runs |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in left.most_common()]
    refused = Counter(
        f"{way}: {says}" for found in judged.found for way, says in found.items() if isinstance(says, str)
    )  # fmt: skip
    lines += [f"| {reason} | {count} |" for reason, count in refused.most_common()]
    return "\n".join(lines) + "\n"


def main(
    measurements: Annotated[Path, typer.Option(help="folder with silicon_sample.csv and llmservingsim/")],
    out: Annotated[Path, typer.Option(help="folder of truth.md, truth.png and truth.json")],
    tables: Annotated[str | None, typer.Option(help="where aiconfigurator-core was installed")] = None,
    only: Annotated[str | None, typer.Option(help="a backend: vllm, trtllm or sglang")] = None,
    every: Annotated[int, typer.Option(help="take every so manyth run")] = 1,
    processes: int = 2,
) -> None:
    kept, left = rows(measurements / "silicon_sample.csv.gz")
    chosen = [row for row in kept if only in (None, row.backend)][::every]
    chosen.sort(key=lambda row: (
        row.model, row.hardware, row.backend, row.dtype, row.tensor_parallel, row.expert_parallel,
    ))  # fmt: skip
    with ProcessPoolExecutor(processes) as pool:  # rows of one profile stay together, so that it is fitted once
        found = list(pool.map(three_ways, chosen, [tables] * len(chosen), chunksize=max(len(chosen) // 20, 1)))
    judged = Judged(chosen, found)
    replays = {name: replay(measurements / "llmservingsim", name) for name in REPLAYS}
    out.mkdir(parents=True, exist_ok=True)
    (out / "truth.md").write_text(page(judged, left, replays), encoding="utf-8")
    (out / "truth.json").write_text(
        json.dumps([{"id": row.id, **says} for row, says in zip(chosen, found, strict=True)], indent=0) + "\n"
    )
    picture(judged, out / "truth.png")
    print((out / "truth.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
