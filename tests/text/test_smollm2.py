"""A real model's text under every policy is transformers' greedy text in float32.

Equal means equal text, or from a place on at which the reference's two likeliest tokens lie within `GAP`, in at most
one prompt. Skipped where `schedlab model fetch smollm2` has not been run.
"""

import json
from functools import cache
from importlib.resources import files

import pytest
import torch
import transformers
from four import FOUR

from schedlab import LLM, SamplingParams
from schedlab.framework.model.files import cache_directory

DIRECTORY = cache_directory("smollm2")
GAP = 1e-4
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 24, "block_size": 8, "max_model_len": 256}
pytestmark = pytest.mark.skipif(
    not (DIRECTORY / "config.json").exists(), reason="needs `schedlab model fetch smollm2`, a download of 93 MB, once"
)


@cache
def prompts() -> list[str]:
    lines = (files("schedlab.workloads") / "data" / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@cache
def reference(count: int, tokens: int) -> list[tuple[str, list[int], list[float]]]:
    """Text, tokens and top-2 logit gaps of the first `count` prompts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
    made = []
    for prompt in prompts()[:count]:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(
            **ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        generated = out.sequences[0, ids.input_ids.shape[1] :].tolist()
        tops = [logits[0].topk(2).values for logits in out.logits]
        text = tokenizer.decode(generated, skip_special_tokens=True)
        made.append((text, generated, [float(top[0] - top[1]) for top in tops]))
    return made


def check(policy: str, count: int, tokens: int) -> None:
    expected = reference(count, tokens)
    llm = LLM("smollm2", policy=FOUR[policy](), **LIMITS)
    found = llm.generate(prompts()[:count], SamplingParams(max_tokens=tokens))
    doubtful = []
    for generation, (text, generated, gaps) in zip(found, expected, strict=True):
        if generation.text == text and list(generation.token_ids) == generated:
            continue
        pairs = enumerate(zip(generation.token_ids, generated, strict=False))
        first = next(i for i, (ours, theirs) in pairs if ours != theirs)
        assert gaps[first] < GAP, f"{generation.prompt!r}: {generation.text!r} is not {text!r}"
        doubtful.append(generation.prompt)
    assert len(doubtful) <= 1, doubtful


def test_a_few_words():
    check("chunked_prefill", count=3, tokens=8)


@pytest.mark.full
@pytest.mark.parametrize("policy", FOUR)
def test_twenty_prompts(policy):
    check(policy, count=20, tokens=32)


@pytest.mark.full
def test_it_makes_sense():
    (answer,) = LLM("smollm2", **LIMITS).generate(
        "What is the capital of France?", SamplingParams(max_tokens=24), chat=True
    )
    assert answer.text == "The capital of France is Paris." and answer.finish_reason == "stop"
