"""Small virtual runs with a cause planted in each, drawn by seed, and one that is balanced."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from schedlab.experiments.run.compose import compose, resolve
from schedlab.experiments.run.job import experiment_of, settings_of

BASE = ("engine=virtual", "model=llama3.1-8b", "hardware=h100", "workload=poisson", "wandb.mode=disabled")
FCFS = {"_target_": "schedlab.policies.fcfs.FCFS"}


def chunked(tokens: int) -> dict:
    return {"_target_": "schedlab.policies.chunked_prefill.ChunkedPrefill", "chunk_size": tokens}


def queueing(draw: random.Random) -> dict:
    """Half as much again and more than the slots can serve."""
    slots = draw.choice([16, 24, 32])
    rate = {16: 9.8, 24: 13.8, 32: 17.4}[slots] * draw.uniform(1.6, 3)
    return {"engine.max_num_seqs": slots, "workload.arrivals.rate": rate, "workload.num_requests": 200}


def interference(draw: random.Random) -> dict:
    """Long prompts beside streams, whole or in large chunks."""
    longest = draw.randint(8000, 12000)
    return {
        "policy": draw.choice([FCFS, chunked(2048)]),
        "workload.lengths.prompt": [3000, longest],
        "workload.lengths.output": [150, 350],
        "workload.arrivals.rate": draw.uniform(2.7, 3.1),
        "workload.num_requests": 80,
    }


def weights(draw: random.Random) -> dict:
    """Few short requests at a time."""
    return {"workload.arrivals.rate": draw.uniform(1, 5), "workload.num_requests": draw.randint(40, 80)}


def preemption(draw: random.Random) -> dict:
    """A burst of prompts that fit into a pool which their outputs outgrow."""
    count = draw.randint(80, 110)
    final_blocks = count * (150 + 700) // 16
    return {
        "workload.num_requests": count,
        "workload.arrivals.rate": draw.uniform(60, 120),
        "workload.lengths.prompt": [100, 200],
        "workload.lengths.output": [500, 900],
        "engine.num_blocks": int(final_blocks * draw.uniform(0.22, 0.3)),
    }


def balanced(draw: random.Random) -> dict:
    """Nothing dominates: a batch large enough to share the weights, prompts that little disturb it, room for all."""
    return {
        "workload.arrivals.rate": draw.uniform(9, 10),
        "workload.lengths.prompt": [400, 900],
        "workload.lengths.output": [500, 900],
        "workload.num_requests": 300,
    }


PLANTED = {
    "queueing": queueing,
    "prefill interference": interference,
    "weight movement": weights,
    "preemption": preemption,
}


@cache
def base(*words: str) -> DictConfig:
    return compose([*BASE, "policy=chunked_prefill", *words])


def run_planted(make, seed: int, directory: Path, *words: str) -> Path:
    """The run directory of one draw; `words` are further overrides."""
    HydraConfig.instance().cfg = None  # of a command that another test called in this process
    config = OmegaConf.create(OmegaConf.to_container(base(*words)))
    draw = random.Random(f"{make.__name__} {seed}")
    for key, value in {**make(draw), "seed": seed + 1}.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    resolved = resolve(config)
    experiment_of(resolved, settings_of(resolved)).run(directory)
    return directory
