"""A real model in float32: whatever policy decides, each request gets the tokens of vLLM's own scheduler and of
transformers. And vLLM's server under a policy, with clients that come and go.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import rig
from whole import Whole

from policies import EVERY
from schedlab.framework.content import TokenContent
from schedlab.framework.errors import ModelError
from schedlab.framework.model.files import model_directory
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.reader import read_run
from schedlab.framework.vllm.own import OwnScheduler

pytestmark = pytest.mark.full
LIMITS = {
    "num_blocks": 30, "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256, "block_size": 32,
    "enable_prefix_caching": True, "watermark": 0.0,
}  # fmt: skip
"""Blocks for about half of what the requests need."""
NUMBER, OUTPUT = 32, 10


@pytest.fixture(scope="module")
def model():
    try:
        return model_directory("fetched:smollm2")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def whole(model):
    made = Whole(model, LIMITS, dtype="float32", gpu_memory_utilization=0.2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def load():
    """Prompts of words that the model has, two of three after one of three common beginnings."""
    rng = np.random.default_rng(0)
    beginnings = [rng.integers(100, 40_000, 64).tolist() for _ in range(3)]
    return {
        f"r{i}": (beginnings[i % 3] if i % 3 or i < 12 else []) + rng.integers(100, 40_000, 5 + i).tolist()
        for i in range(NUMBER)
    }


def requests_of(load):
    return [
        EngineRequest(name, 0, len(prompt), TokenContent(prompt), recorded_output_tokens=OUTPUT)
        for name, prompt in load.items()
    ]


@pytest.fixture(scope="module")
def by_transformers(model, load):
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = {}
    for name, prompt in load.items():
        ids, past, out = torch.tensor([prompt]), None, []
        for _ in range(OUTPUT):
            with torch.no_grad():
                done = network(ids, past_key_values=past, use_cache=True)
            ids, past = done.logits[:, -1:].argmax(-1), done.past_key_values
            out.append(int(ids))
        tokens[name] = out
    return tokens


def served(whole, policy, load):
    source, tables, scheduler = whole.serve(policy, *requests_of(load))
    rig.assert_empty(scheduler)
    return {name: tokens for name, _, tokens in source.ended}, tables


@pytest.mark.parametrize("name", ["vllm", *sorted(EVERY)])
def test_tokens_are_those_of_transformers(name, whole, load, by_transformers):
    """And so every policy's are those of vLLM's own scheduler, which is among them."""
    policy = OwnScheduler() if name == "vllm" else EVERY[name]()
    tokens, tables = served(whole, policy, load)
    if name == "shedding":  # whom it turns away gets none
        rejected = tables.requests["status"].count("rejected")
        tokens = {asked: answer for asked, answer in tokens.items() if answer}
        assert len(tokens) == NUMBER - rejected > 0
    else:
        assert len(tokens) == NUMBER and tables.summary["requests/finished"] == NUMBER
    assert tokens == {asked: by_transformers[asked] for asked in tokens}


# ---- the server ----


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture
def server(model, tmp_path):
    """The OpenAI server under a policy, recorded into a folder: (its address, the folder)."""
    port, out = free_port(), tmp_path / "out"
    settings = {"schedlab": {"_target_": "schedlab.policies.fair.Fair", "chunk_size": 64}}
    words = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m",
        "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--block-size",
        "32", "--num-gpu-blocks-override", "200", "--enforce-eager", "--scheduler-cls", "schedlab.vllm.Scheduler",
        "--additional-config", json.dumps(settings), "--shutdown-timeout", "30",
    ]  # fmt: skip
    environment = {**os.environ, "SCHEDLAB_OUT": str(out), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, tmp_path / "log")
            yield f"http://127.0.0.1:{port}", out, process
        finally:
            process.terminate()
            process.wait(60)


def wait_for(address, process, log):
    for _ in range(600):
        if process.poll() is not None:
            raise AssertionError(log.read_text()[-3000:])
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server does not start:\n" + log.read_text()[-3000:])


def complete(address, prompt, client, tokens=OUTPUT, stream=False):
    body = {
        "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream,
        "return_token_ids": True, "vllm_xargs": {"schedlab_client": client},
    }  # fmt: skip
    content = json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/v1/completions", content, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=300)


def test_twelve_clients_at_once_of_whom_one_hangs_up(server, load, by_transformers):
    address, out, process = server
    names = list(load)[:12]

    def ask(name):
        with complete(address, load[name], f"client of {name}") as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def hang_up(name):
        with complete(address, load[name], f"client of {name}", tokens=300, stream=True) as answer:
            answer.readline()  # the first token, and nobody reads on

    with ThreadPoolExecutor(12) as clients:
        gone = clients.submit(hang_up, names[0])
        answers = dict(zip(names[1:], clients.map(ask, names[1:]), strict=True))
        gone.result()
    assert answers == {name: by_transformers[name] for name in names[1:]}
    assert ask("r20") == by_transformers["r20"], "it goes on"
    process.terminate()
    assert process.wait(60) is not None
    run = read_run(out)
    assert run.status == "finished" and len(run.requests["request_id"]) == 13
    statuses = dict(zip(run.requests["client"], run.requests["status"], strict=True))
    assert statuses.pop(f"client of {names[0]}") == "aborted" and set(statuses.values()) == {"finished"}
