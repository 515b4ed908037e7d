"""Prompts as a workload, their stored texts, and the commands `generate` and `model fetch`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_text import VOCAB, save_tokenizer

from schedlab import LLM, SamplingParams, engines
from schedlab.framework.errors import ConfigError, TraceError
from schedlab.framework.model.tokenizer import Tokenizer
from schedlab.framework.results import packed
from schedlab.framework.results.reader import read_run
from schedlab.workloads.arrivals import Poisson
from schedlab.workloads.text import Text, read_prompts

ROWS = [
    {"arrival_s": 0.0, "prompt": "once upon a time"},
    {"arrival_s": 0.25, "prompt": "the quick brown fox", "max_tokens": 5, "client": "b"},
    {"arrival_s": 0.5, "messages": [{"role": "user", "content": "hi"}], "output_tokens": 7, "request_id": "chat"},
    {"arrival_s": 0.75, "prompt": "naïve 東京", "priority": 2},
]
QUICK = ("engine.num_blocks=32", "engine.max_model_len=128", "wandb.mode=disabled", "plots=false", "hydra.run.dir=out")


@pytest.fixture(scope="module")
def tokenizer(model_directory):
    return Tokenizer(model_directory)


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def test_rows_become_requests(write, tokenizer):
    trace = read_prompts(write(*ROWS), tokenizer)
    prompts = [tokenizer.encode(row.get("prompt") or row["messages"]) for row in ROWS]
    assert [trace.tokens.row(i).tolist() for i in range(4)] == prompts
    assert trace.prompt_tokens.tolist() == [len(prompt) for prompt in prompts]
    assert trace.output_tokens.tolist() == [-1, -1, 7, -1] and trace.max_tokens.tolist() == [-1, 5, -1, -1]
    assert trace.arrival_ns.tolist() == [0, 250_000_000, 500_000_000, 750_000_000]
    assert trace.client.tolist() == [None, "b", None, None] and trace.request_id[2] == "chat"
    assert trace.priority.tolist() == [0, 0, 0, 2] and (trace.preparation_ns > 0).all()


def test_rows_out_of_order_are_sorted_and_counted(write, tokenizer):
    trace = read_prompts(write(*ROWS[::-1]), tokenizer)
    prompts = [tokenizer.encode(row.get("prompt") or row["messages"]) for row in ROWS]
    assert [trace.tokens.row(i).tolist() for i in range(4)] == prompts and trace.provenance.counts["inversions"] == 3


def test_chat_wraps_plain_prompts(write, tokenizer):
    trace = read_prompts(write({"arrival_s": 0, "prompt": "hi"}), tokenizer, chat=True)
    assert trace.tokens.row(0).tolist() == tokenizer.encode("hi", chat=True)


@given(spent=st.lists(st.integers(0, 10**9), min_size=4, max_size=4))
def test_measured_times_are_the_requests_preparation(model_directory, tmp_path_factory, spent):
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    workload = Text(path=str(path), tokenizer=str(model_directory))
    trace = workload.load().with_columns(preparation_ns=np.array(spent))
    source, got = workload.source(128, trace=trace), []
    while (now := source.peek()) is not None:
        got += [(now, request) for request in source.pop(now)]
    assert [now for now, _ in got] == sorted(a + p for a, p in zip(trace.arrival_ns.tolist(), spent, strict=True))
    assert all(now == r.visible_ns == r._arrival_ns + spent[r.source_row] for now, r in got)


def test_a_file_without_times_takes_an_arrival_process(write, model_directory):
    path = write({"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(ConfigError, match=r"set workload\.arrivals"):
        Text(path=str(path), tokenizer=str(model_directory)).load()
    trace = Text(path=str(path), tokenizer=str(model_directory), arrivals=Poisson(2.0)).load()
    assert len(trace) == 2 and trace.arrival_ns[1] > trace.arrival_ns[0]


FAULTS = [
    ("{", "not JSON"),
    (
        {"arrival_s": 0},
        "expected a text as prompt, or a list of objects as messages; found prompt None and messages None",
    ),
    ({"arrival_s": 0, "prompt": 7}, "found prompt 7"),
    ({"arrival_s": 0, "prompt": "a", "messages": []}, "expected a text as prompt, or a list"),
    ({"arrival_s": -1, "prompt": "a"}, "arrival_s"),
    ({"arrival_s": 0, "prompt": "a", "max_tokens": 0}, "max_tokens is 0, expected an integer of at least 1"),
    ({"arrival_s": 0, "prompt": "a", "output_tokens": 1.5}, "output_tokens is 1.5"),
    ({"arrival_s": 0, "prompt": "a", "priority": "high"}, "priority"),
    ({"arrival_s": 0, "messages": [{"role": "user"}]}, "messages"),
]


@pytest.mark.parametrize("row, said", FAULTS)
def test_a_faulty_row_is_named(write, tmp_path, row, said):
    save_tokenizer(tmp_path, template="{{ messages[0]['content'] + '' }}")
    path = write(ROWS[0], row)
    with pytest.raises(TraceError) as caught:
        read_prompts(path, Tokenizer(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"{path}: row 1 (line 2): ") and said in message and "\n" not in message


def test_a_tokenizer_of_another_model_is_refused(write, tmp_path, model_directory):
    save_tokenizer(tmp_path, extra=200)
    path = write({"arrival_s": 0, "prompt": "<extra199>"})
    workload = Text(path=str(path), tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match=f"below its vocab_size of {VOCAB}, found"):
        workload.source(128, vocab_size=VOCAB)


# ---- runs ----


def test_a_run_of_text(schedlab, write, model_directory, tokenizer):
    """Real tokens, stop strings, forced and live lengths, measured preparation, and the texts on request."""
    texts = [g.text for g in LLM(str(model_directory), num_blocks=32, max_model_len=128).generate(
        [row["prompt"] for row in ROWS if "prompt" in row], SamplingParams(max_tokens=9))]  # fmt: skip
    stop = texts[0][3:5]
    done = schedlab(
        "run", *QUICK, "workload=text", f"workload.path={write(*ROWS)}", f"model.path={model_directory}",
        "workload.max_tokens=9", f'workload.sampling.stop=["{stop}"]', "store_text=true",
    )  # fmt: skip
    assert done.code == 0, done.err
    run = read_run("out")
    with packed.opened(packed.find(Path("out"), "outputs.jsonl")) as file:
        outputs = {row["request_id"]: row for row in map(json.loads, file)}
    cut = [text.split(stop)[0] for text in texts]
    assert [outputs[name]["text"] for name in ("0", "3")] == [cut[0], cut[2]] and cut[0] != texts[0]
    assert len(outputs["1"]["token_ids"]) <= 5 and len(outputs["chat"]["token_ids"]) == 7
    assert set(run.requests["status"]) == {"finished"}
    assert (run.requests["visible_s"] > run.requests["arrival_s"]).all()
    assert run.result["measurement"]["observed_at"] == "engine"


def test_measured_times_need_a_clock_that_measures(schedlab, write, model_directory):
    words = ("workload=text", f"workload.path={write(*ROWS)}", f"model.path={model_directory}", "workload.max_tokens=8")
    refused = schedlab("run", *QUICK, *words, "engine=virtual")
    assert refused.code == 2 and "found clock=virtual (with workload.measure_tokenizer=false" in refused.err
    stage = ("observed_at=client", "observed_at.preparation.per_token_s=0.001")
    done = schedlab("run", *QUICK, *words, "engine=virtual", "workload.measure_tokenizer=false", *stage)
    assert done.code == 0, done.err
    table = read_run("out").requests
    assert table["visible_s"] - table["arrival_s"] == pytest.approx(table["prompt_tokens"] / 1000)


def test_text_needs_a_tokenizer(schedlab):
    done = schedlab("run", *QUICK, "workload=text")
    assert done.code == 2 and "needs workload.tokenizer: model=smollm2, or a model's directory" in done.err
    done = schedlab("run", *QUICK, "workload.max_requests=2", "store_text=true")
    assert done.code == 2 and "expected a model with a tokenizer" in done.err


def test_engines_know_where_their_model_is(model_directory):
    setup = engines.cpu(str(model_directory), num_blocks=8, max_model_len=64)
    assert setup.path == str(model_directory) and engines.stub("tiny").path is None


# ---- schedlab generate ----


def generate(schedlab, model_directory, *words):
    return schedlab(
        "generate", *words, f"model.path={model_directory}", "engine.num_blocks=32", "engine.max_model_len=128"
    )


def test_generate_prints_the_text(schedlab, model_directory, tmp_path):
    llm = LLM(str(model_directory), num_blocks=32, max_model_len=128)
    one, two = llm.generate(["once upon", "max_tokens=5"], SamplingParams(max_tokens=6))
    done = generate(schedlab, model_directory, "once upon", "sampling.max_tokens=6")
    assert (done.code, done.out) == (0, one.text + "\n") and "6 tokens" in done.err
    done = generate(schedlab, model_directory, "max_tokens=5", "once upon", "sampling.max_tokens=6", "policy=fcfs")
    assert f"--- once upon\n{one.text}\n" in done.out and f"--- max_tokens=5\n{two.text}\n" in done.out
    assert not list((tmp_path / "work").iterdir()), "nothing is left behind"


def test_an_answer_that_ends_at_once_hints_at_the_chat_template(schedlab, model_directory, tmp_path):
    """The token that the model says first is made its end of text."""
    (said,) = LLM(str(model_directory), num_blocks=32, max_model_len=128).generate("once", SamplingParams(max_tokens=1))
    curt = tmp_path / "curt"
    shutil.copytree(model_directory, curt)
    for name in ("config.json", "generation_config.json"):
        keys = json.loads((curt / name).read_text())
        (curt / name).write_text(json.dumps({**keys, "eos_token_id": said.token_ids[0]}))
    assert "chat=true" in generate(schedlab, curt, "once").err
    assert "chat=true" not in generate(schedlab, curt, "once", "chat=true", "sampling.max_tokens=1").err
    assert "chat=true" not in generate(schedlab, model_directory, "once", "sampling.max_tokens=1").err
    (curt / "chat_template.jinja").unlink()
    assert "chat=true" not in generate(schedlab, curt, "once").err


def test_generate_records_on_request(schedlab, model_directory):
    done = generate(schedlab, model_directory, "hi", "chat=true", "sampling.max_tokens=3", "out=kept")
    assert done.code == 0, done.err
    run = read_run("kept")
    assert run.result["measurement"]["observed_at"] == "client" and run.summary["requests/finished"] == 1
    with packed.opened(packed.find(Path("kept"), "outputs.jsonl")) as file:
        assert json.loads(file.read())["text"] + "\n" == done.out


def test_generate_says_what_is_wrong(schedlab, model_directory):
    def error(*words):
        done = generate(schedlab, model_directory, *words)
        assert done.code == 2 and done.err.count("\n") == 1, done.err
        return done.err

    assert "prompt 1 rejected: needs" in error("fox " * 100)
    assert "sampling.temperature: expected a finite number of at least 0, found -1" in error(
        "a", "sampling.temperature=-1"
    )
    assert "sampling.temperature: expected a number, found 'warm'" in error("a", "sampling.temperature=warm")
    assert "sampling.temprature" in error("a", "sampling.temprature=1")
