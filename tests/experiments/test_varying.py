"""Which words of a job a sweep gives several values."""

from pathlib import Path

from omegaconf import OmegaConf

from schedlab.experiments.sweep.varying import words_that_vary


def asked(folder: Path, *words: str) -> Path:
    told = {"hydra": {"overrides": {"task": list(words)}, "sweep": {"dir": "${now:%Y}"}}}
    OmegaConf.save(told, folder / "multirun.yaml")
    return folder


def test_the_words_with_several_values(tmp_path):
    several = ("policy=fcfs,orca", "seed=range(0,3)", "+policy.chunk_size=choice(64)")
    words = (*several, "engine=stub", "workload.window=[0,60]")
    job = {"policy": "orca", "seed": "2", "policy.chunk_size": "64", "engine": "stub", "workload.window": "[0,60]"}
    assert words_that_vary(asked(tmp_path, *words), job) == ["policy=orca", "seed=2", "policy.chunk_size=64"]


def test_a_later_sweep_in_the_same_folder_counts(tmp_path):
    job = {"policy": "orca", "seed": "2"}
    assert words_that_vary(asked(tmp_path, "policy=fcfs,orca", "seed=2"), job) == ["policy=orca"]
    file = asked(tmp_path, "policy=orca", "seed=1,2") / "multirun.yaml"
    assert words_that_vary(tmp_path, job) == ["seed=2"] and file.exists()


def test_without_hydra_s_file_nothing_is_said(tmp_path):
    assert words_that_vary(tmp_path, {"policy": "orca"}) == []
