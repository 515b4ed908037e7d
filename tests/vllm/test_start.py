"""What is looked at when a scheduler is made: its policy, vLLM's version, names and features."""

import json

import pytest
import rig

import schedlab.vllm
from schedlab.framework.errors import ConfigError
from schedlab.framework.vllm import surface
from schedlab.framework.vllm.scheduler import Asynchronous, Synchronous
from schedlab.framework.vllm.settings import read_settings
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS

CHUNKED = {"_target_": "schedlab.policies.chunked_prefill.ChunkedPrefill", "chunk_size": 96}
MAX = {"_target_": "schedlab.framework.predictors.MaxPredictor"}


def test_the_class_is_asynchronous_or_not_as_vllm_is():
    for is_async, kind in ((False, Synchronous), (True, Asynchronous)):
        keys = rig.arguments(is_async=is_async, additional_config={"schedlab": CHUNKED})
        assert type(schedlab.vllm.Scheduler(**keys)) is kind


def test_a_policy_with_knobs_a_rule_and_a_predictor():
    rule = {"_target_": "schedlab.policies.victims.least_computed", "_partial_": True}
    told = {**CHUNKED, "victim": rule, "predictor": MAX, "publish": "schedule", "on_fault": "fallback"}
    settings = read_settings({"schedlab": told})
    assert isinstance(settings.policy, ChunkedPrefill) and settings.policy.chunk_size == 96
    assert settings.policy.victim.__name__ == "least_computed"
    assert (type(settings.predictor).__name__, settings.publish, settings.on_fault) == (
        "MaxPredictor", "schedule", "fallback",
    )  # fmt: skip


def test_the_environment_says_it_where_vllms_configuration_does_not(monkeypatch):
    monkeypatch.setenv("SCHEDLAB_POLICY", json.dumps({"_target_": "schedlab.policies.fcfs.FCFS"}))
    assert isinstance(read_settings({}).policy, FCFS)
    assert isinstance(read_settings({"schedlab": CHUNKED}).policy, ChunkedPrefill)


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (None, 'no policy: set additional_config["schedlab"] or SCHEDLAB_POLICY'),
        ("fcfs", "expected a mapping with _target_, the policy's class; found 'fcfs'"),
        ({**CHUNKED, "chunk": 3}, "unexpected keyword argument 'chunk'"),
        ({**CHUNKED, "chunk_size": 0}, "policy.chunk_size: expected at least 1 token, found 0"),
        ({"_target_": "nowhere.Mine"}, "schedlab._target_=nowhere.Mine: ModuleNotFoundError"),
        ({"_target_": "schedlab.policies.fcfs.Nobody"}, "has no attribute 'Nobody'"),
        ({"_target_": "schedlab.framework.request.SLO"}, "expected a Policy, found SLO"),
        ({**CHUNKED, "publish": "later"}, "schedlab.publish: expected commit or schedule, found 'later'"),
        ({**CHUNKED, "on_fault": "ignore"}, "schedlab.on_fault: expected raise or fallback, found 'ignore'"),
        ({"_target_": "schedlab.policies.sjf.SJF"}, "policy SJF reads predicted_output_tokens"),
    ],
)
def test_a_mistake_is_one_line(told, line, monkeypatch):
    monkeypatch.delenv("SCHEDLAB_POLICY", raising=False)
    with pytest.raises(ConfigError) as caught:
        read_settings({"schedlab": told})
    assert line in str(caught.value) and "\n" not in str(caught.value)


VERSIONS = [("0.30.2", False), ("0.31.0", True), ("0.33.1rc2", True), ("0.34.0", False), ("1.0", False)]


@pytest.mark.parametrize(("version", "fits"), VERSIONS)
def test_only_versions_that_were_tried(version, fits):
    if fits:
        surface.check_version(version)
        return
    with pytest.raises(ConfigError, match=rf"expected vLLM 0.31 to 0.33, found {version}"):
        surface.check_version(version)


def test_a_name_that_vllm_has_no_more_is_named(monkeypatch):
    names = {**surface.NAMES, "kv_cache_manager": ("allocate_slots", "conjure")}
    monkeypatch.setattr(surface, "NAMES", names)
    with pytest.raises(ConfigError, match=r"this vLLM's scheduler has no kv_cache_manager.conjure"):
        rig.scheduler_of(FCFS())


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"policy": "priority"}, "vLLM's policy=priority"),
        ({"long_prefill_token_threshold": 64}, "long_prefill_token_threshold"),
    ],
)
def test_a_feature_that_no_policy_is_told_of_is_named(keys, named):
    with pytest.raises(ConfigError, match=f"a schedlab policy cannot be combined with {named}"):
        rig.scheduler_of(FCFS(), **keys)


def test_every_other_feature_is_named():
    scheduler = rig.scheduler_of(FCFS())
    found = surface._features(scheduler)
    assert not any(found.values()), found
    scheduler.num_spec_tokens, scheduler.connector, scheduler.ec_connector = 3, object(), object()
    scheduler.is_encoder_decoder, scheduler.lora_config = True, object()
    scheduler.hash_block_size = 16
    with pytest.raises(ConfigError) as caught:
        surface.check_features(scheduler)
    for name in ("speculative decoding", "a KV connector", "an EC connector", "encoder inputs", "LoRA", "hashed in"):
        assert name in str(caught.value)
