"""Resolved configs are what OmegaConf makes of them, and what is missing is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from schedlab.experiments.run import compose
from schedlab.experiments.run.checks import check_arguments
from schedlab.experiments.run.job import Objective
from schedlab.framework.errors import ConfigError

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(
        ["", "plain", "a $ b", "${number}", "${group}", "${group.list}", "n=${number}", "${group.list[1]}"]
    ),
    st.sampled_from([r"\${number}", "${oc.select:nowhere,5}", "${chain}"]),
)
TREES = st.recursive(
    VALUES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)),
    max_leaves=20,
)


def config_of(tree: object) -> DictConfig:
    group = {"list": [1, "${number}"], "inner": {"again": "${chain}"}}
    return OmegaConf.create({"number": 3, "group": group, "chain": "${number}", "tree": tree})


@given(TREES)
def test_resolving_gives_what_omegaconf_gives(tree):
    config = config_of(tree)
    assert compose.resolve(config) == OmegaConf.to_container(config, resolve=True)


def test_a_part_finds_what_its_interpolations_name_in_the_whole():
    config = OmegaConf.create({"model": {"name": "m"}, "engine": {"model": "${model}", "near": "${.model}"}})
    assert compose.resolve(config.engine) == {"model": {"name": "m"}, "near": {"name": "m"}}


def test_two_uses_of_one_node_share_nothing():
    resolved = compose.resolve(OmegaConf.create({"model": {"sizes": [1]}, "a": "${model}", "b": "${model}"}))
    resolved["a"]["sizes"].append(2)
    assert resolved["b"] == resolved["model"] == {"sizes": [1]}


@pytest.mark.parametrize("config", [{"a": {"b": "???"}}, {"z": "${a}", "a": {"b": "???"}}, {"a": {"b": ["???"]}}])
def test_what_is_missing_is_named(config):
    with pytest.raises(ConfigError, match=r"^a\.b(\[0\])? has no default: give a\.b"):
        compose.resolve(OmegaConf.create(config))


@pytest.mark.parametrize("values", [None, "p99", ["p99"]])
def test_a_section_that_is_no_mapping_is_one_line(values):
    with pytest.raises(ConfigError, match=r"^objective: expected a mapping of keys to values, found "):
        check_arguments("objective", values, Objective)
