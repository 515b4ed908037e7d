"""Parts of a configuration become objects as Hydra makes them; what is not schedlab's, Hydra itself makes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from schedlab.experiments.run import compose
from schedlab.experiments.studies import leaderboard
from schedlab.framework.errors import ConfigError

FCFS = "schedlab.policies.fcfs.FCFS"


def shape(value: Any) -> Any:
    """What an object is made of, so that two can be compared."""
    if isinstance(value, partial):
        return value.func, shape(value.args), shape(value.keywords)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), {field.name: shape(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [shape(inner) for inner in value]
    return value if isinstance(value, (int, float, str, type(None))) else type(value)


def test_every_policy_is_the_one_that_hydra_makes(workspace):
    with hydra.initialize_config_module(compose.CONFIG_MODULE, version_base="1.3"):
        for name in leaderboard.installed_policies(GlobalHydra.instance().config_loader()):
            node = compose.compose([f"policy={name}"]).policy
            expected = shape(hydra.utils.instantiate(node, _convert_="all"))
            for told in (node, compose.resolve(node)):
                assert shape(compose.build(told, "policy")) == expected


@pytest.mark.parametrize("words", [("workload=long_prompt_burst",), ("engine=virtual", "workload=mixture"), ()])
def test_so_is_every_other_part(workspace, words):
    config = compose.compose(words)
    for group in ("workload", "engine", "slo", "hardware"):
        expected = shape(hydra.utils.instantiate(config[group], _convert_="all"))
        assert shape(compose.build(config[group], group)) == expected


@pytest.mark.parametrize(
    ("node", "by_hydra"),
    [
        ({"_target_": FCFS}, False),
        ({"_target_": FCFS, "victim": {"_target_": "schedlab.policies.victims.newest", "_partial_": True}}, False),
        ({"_target_": "mine.Mine"}, True),
        ({"_target_": FCFS, "victim": {"_target_": "mine.Mine"}}, True),
        ({"_target_": FCFS, "_convert_": "none"}, True),
        ({"_target_": "schedlab.experiments.run.compose.import_module", "name": "this"}, True),  # by another name
    ],
)
def test_what_is_not_schedlabs_hydra_makes(workspace, monkeypatch, node, by_hydra):
    Path("mine.py").write_text("class Mine:\n    pass\n")
    monkeypatch.syspath_prepend(str(workspace))
    asked: list[Any] = []
    monkeypatch.setattr(hydra.utils, "instantiate", lambda node, **_: asked.append(node))
    compose.build(node, "policy")
    assert bool(asked) == by_hydra


def test_a_part_that_raises_is_one_line(workspace):
    with pytest.raises(ConfigError, match=r"^policy \(schedlab.policies.fcfs.FCFS\): TypeError: .*no_such"):
        compose.build({"_target_": FCFS, "no_such": 1}, "policy")
