"""`schedlab replay`: a run executed again from its own folder, as it was or under another policy."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from schedlab.experiments.analysis.decisions import parting
from schedlab.experiments.analysis.past_run import PastRun
from schedlab.experiments.analysis.rebuild import check_literal, rebuild
from schedlab.experiments.run.manifest import MANIFEST, write_manifest
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.results.tables import RunTables
from schedlab.workloads.workload import Workload

# ---- the same decisions ----


@dataclass(frozen=True, slots=True)
class Replayed:
    """A run executed again. `first`: where its decisions part from the log's, by step; `same_times`: for modelled runs,
    whether every request got its tokens when it did."""

    digest: str
    again: str
    first: int | None
    same_times: bool | None

    @property
    def equal(self) -> bool:
        return self.digest == self.again


def replay(directory: str | Path, policy: Policy | None = None, *, trust: bool = False) -> Replayed:
    """Execute the run in `directory` again; `policy` is the one it had, where the files cannot say.

    ConfigError for a run whose folder lacks what is needed.
    """
    past = PastRun(Path(directory), trust)
    engine = past.again(policy)
    engine.run()
    tables = engine.recorder.close(backlog_end=engine.num_unfinished, counters={})
    assert past.tables.digest is not None and tables.digest is not None
    if past.tables.digest != tables.digest:
        first = None if past.tables.result["record"] == "summary" else parting(past.tables.decisions, tables.decisions)
        return Replayed(past.tables.digest, tables.digest, first[0] if first else None, None)
    return Replayed(past.tables.digest, tables.digest, None, same_times(past, tables) if past.modelled else None)


def same_times(past: PastRun, again: RunTables) -> bool:
    if past.tables.result["record"] == "summary":
        return all(again.summary[key] == past.tables.summary[key] for key in ("ttft/mean", "e2e/mean", "makespan_s"))
    logged = past.tables.requests
    return all(
        np.array_equal(logged[name], again.requests[name], equal_nan=True)
        for name in ("first_scheduled_s", "first_token_s", "finished_s")
    )


# ---- another policy ----


def counterfactual(
    directory: str | Path, policy: Policy, out: Path | None = None, *, label: str | None = None,
    node: Mapping[str, Any] | None = None, predictor: Predictor | None = None, trust: bool = False,
) -> RunTables:  # fmt: skip
    """What `policy` makes of the same requests on the same engine; in the run directory `out`, if given.

    A run of a real engine is run on that engine, now. `label` and `node` are the policy's name and configuration for
    the manifest; a `predictor` replaces the run's own.
    """
    from schedlab.experiments.run.api import Experiment

    past = PastRun(Path(directory), trust)
    setup, config, labels = past.make_setup(), past.manifest["config"], past.manifest["labels"]
    slo = past.part("slo")
    tables = Experiment(
        policy=policy, workload=cast(Workload, past.workload), engine=setup, seed=int(labels.get("seed", 0)),
        slo=None if slo is None else rebuild(slo, "slo"),
        predictor=predictor or past.make_predictor(), admission=past.make_admission(), clock=past.manifest["clock"],
        **config.get("measure", {}),
        config={**config, "policy": dict(node or {"class": type(policy).__name__})},
        labels={**labels, "policy": label or type(policy).__name__},
        overrides={key: value for key, value in past.manifest["overrides"].items() if key.split(".")[0] != "policy"},
    ).run(out)  # fmt: skip
    if out is not None:
        written = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        write_manifest(out, {**written, "workload": past.manifest["workload"]})  # it was offered the same
    return tables


def replay_command(
    directory: Path, policy: str | None, words: Sequence[str], out: Path | None, *, trust: bool = False
) -> bool:
    """The command. Returns whether the decisions were the same; under another policy nothing is asserted."""
    if policy is None:
        return _told(directory, replay(directory, trust=trust))
    from omegaconf import OmegaConf

    from schedlab.experiments.analysis.table import Comparison
    from schedlab.experiments.run import compose

    check_counterfactual(words, out)
    config = compose.compose([f"policy={policy}", *words])
    past = PastRun(directory).manifest["config"]
    if "estimator" in past:  # step times of that run's model and machine, where the policy asks for them
        check_literal(past["estimator"], "estimator")
        OmegaConf.update(config, "estimator", past["estimator"], merge=False, force_add=True)
    made, predictor = compose.build(config.policy, "policy"), compose.build_optional(config.predictor, "predictor")
    node = compose.resolve(config.policy)
    with tempfile.TemporaryDirectory() as kept_nowhere:
        place = out or Path(kept_nowhere)
        counterfactual(directory, made, place, label=policy, node=node, predictor=predictor, trust=trust)
        comparison = Comparison.read([directory, place])
        comparison.names = [comparison.runs[0].policy, policy]
        comparison.show()
    print(f"{policy} on what {directory} was offered" + (f", in {out}" if out else "; --out keeps the run"))
    return True


def check_counterfactual(words: Sequence[str], out: Path | None) -> None:
    """ConfigError for words that change more than who decides, and for a folder that holds a run."""
    for word in words:
        if re.match(r"[+~]*(policy\.|predictor[.=])", word) is None:
            raise ConfigError(f"replay: expected policy.… or predictor=…, all else being as it was; found {word}")
    if out is not None and (out / "result.json").exists():
        raise ConfigError(f"{out}: holds a run already; name another folder")


def _told(directory: Path, done: Replayed) -> bool:
    if done.equal:
        times = {True: ", every token at the same time", False: ", at other times", None: ""}[done.same_times]
        print(f"{directory}: the same decisions{times}, digest {done.digest}")
    else:
        where = "" if done.first is None else f" from step {done.first} on"
        print(f"{directory}: other decisions{where}: digest {done.again}, in the files {done.digest}")
    return done.equal and done.same_times is not False
