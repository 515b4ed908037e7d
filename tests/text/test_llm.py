"""`schedlab.LLM` on a tiny model: text in and text out against transformers, what ends it, and the consumer's times."""

import json

import numpy as np
import pytest
import torch
from four import ALL, FOUR
from tiny_text import tiny_model

from schedlab import LLM, SamplingParams, engines
from schedlab.experiments.run.llm import Piece
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.tokenizer import Tokenizer
from schedlab.framework.results import packed
from schedlab.framework.results.reader import read_run

PROMPTS = ["once upon", "the quick brown fox", "naïve 東京", "fox " * 20, "the quick brown dog", "a"]
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_blocks": 24, "block_size": 8, "max_model_len": 200}


@pytest.fixture(scope="module")
def make(model_directory):
    return lambda **keys: LLM(str(model_directory), **{**LIMITS, **keys})


@pytest.fixture(scope="module")
def tokenizer(model_directory):
    return Tokenizer(model_directory)


@pytest.fixture(scope="module")
def expected(tokenizer):
    """Greedy continuations by transformers: 24 tokens, or fewer up to the end-of-text token."""
    return {prompt: greedy(tokenizer.encode(prompt)) for prompt in PROMPTS}


def greedy(prompt, count=24):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = tiny_model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("policy", ALL)
def test_text_is_what_transformers_generates(make, tokenizer, expected, policy):
    found = make(policy=ALL[policy](), swap_space_gib=0.01).generate(PROMPTS, SamplingParams(max_tokens=24))
    assert [g.prompt for g in found] == PROMPTS
    for generation in found:
        tokens = expected[generation.prompt]
        assert list(generation.token_ids) == tokens
        assert generation.text == tokenizer.decode(tokens)
        assert list(generation.prompt_token_ids) == tokenizer.encode(generation.prompt)
        assert generation.finish_reason == ("stop" if tokens[-1] == 2 else "length")


def test_pieces_join_to_the_text(make):
    llm = make()
    texts, tokens, times = [""] * len(PROMPTS), [()] * len(PROMPTS), []
    for piece in llm.stream(PROMPTS, SamplingParams(max_tokens=24)):
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
        times.append(piece.time_s)
        assert len(piece.token_ids) == 1
    again = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert texts == [g.text for g in again] and tokens == [g.token_ids for g in again]
    assert times == sorted(times)


def test_token_ids_are_a_prompt_too(make, tokenizer, expected):
    one, two = PROMPTS[:2]
    ids = tokenizer.encode(one)
    (alone,) = make().generate(ids, SamplingParams(max_tokens=24))
    pair = make().generate([np.array(ids).tolist(), tokenizer.encode(two)], SamplingParams(max_tokens=24))
    assert (
        list(alone.token_ids) == list(pair[0].token_ids) == expected[one] and list(pair[1].token_ids) == expected[two]
    )
    assert alone.prompt is None and make().generate([]) == []


def test_a_conversation_goes_through_the_template(make, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    params, llm = SamplingParams(max_tokens=4), make()
    one, two, three = [
        *llm.generate(messages, params), *llm.generate("hi", params, chat=True), *llm.generate([messages], params),
    ]  # fmt: skip
    assert one.prompt_token_ids == two.prompt_token_ids == three.prompt_token_ids == tuple(tokenizer.encode(messages))
    assert one.token_ids == two.token_ids == three.token_ids


# ---- what ends it ----


def longest(expected):
    return max(expected, key=lambda prompt: len(expected[prompt]))


def test_max_tokens(make, expected):
    prompt = longest(expected)
    (got,) = make().generate(prompt, SamplingParams(max_tokens=5))
    assert list(got.token_ids) == expected[prompt][:5] and got.finish_reason == "length" and got.stop_reason is None


def test_no_limit_is_the_model_s(make):
    (got,) = make(max_model_len=40, num_blocks=8).generate("a", SamplingParams(ignore_eos=True))
    assert len(got.prompt_token_ids) + len(got.token_ids) == 40 and got.finish_reason == "length"


def test_a_stop_token_ends_it_and_is_no_text(make, tokenizer, expected):
    prompt = longest(expected)
    tokens = expected[prompt]
    (got,) = make().generate(prompt, SamplingParams(max_tokens=24, stop_token_ids=(tokens[7],)))
    end = tokens.index(tokens[7])
    assert list(got.token_ids) == tokens[: end + 1] and (got.finish_reason, got.stop_reason) == ("stop", tokens[7])
    assert got.text == tokenizer.decode(tokens[:end])


def test_the_end_of_text_ends_it_unless_ignored(make, model_directory, expected, monkeypatch):
    prompt = longest(expected)
    tokens = expected[prompt]
    llm = make()
    llm._engine.commit.eos_token_ids = llm._engine.executor.eos_token_ids = (tokens[3],)
    end = tokens.index(tokens[3]) + 1
    ended, ignored = llm.generate(
        [prompt, prompt], [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, ignore_eos=True)]
    )
    assert list(ended.token_ids) == tokens[:end] and (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert list(ignored.token_ids) == tokens and ignored.finish_reason == "length"


@pytest.mark.parametrize("policy", FOUR)
def test_a_stop_string_ends_it_and_no_other(make, tokenizer, expected, policy):
    """The string is taken from inside one prompt's text, across tokens; the others' texts do not change."""
    prompt = longest(expected)
    whole = tokenizer.decode(expected[prompt])
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    params = [SamplingParams(max_tokens=24, stop=("never", stop) if p == prompt else ()) for p in PROMPTS]
    for got in make(policy=FOUR[policy]()).generate(PROMPTS, params):
        tokens = expected[got.prompt]
        if got.prompt == prompt:
            assert got.text == whole[: whole.index(stop)] and (got.finish_reason, got.stop_reason) == ("stop", stop)
            assert list(got.token_ids) == tokens[: len(got.token_ids)] and len(got.token_ids) < len(tokens)
            assert stop in tokenizer.decode(got.token_ids) and stop not in tokenizer.decode(got.token_ids[:-1])
        else:
            assert list(got.token_ids) == tokens


def test_seeds_alone_decide_what_is_drawn(make):
    def drawn(prompts, seed, **keys):
        params = SamplingParams(temperature=1.0, top_p=0.95, seed=seed, max_tokens=12, ignore_eos=True)
        return [g.token_ids for g in make(**keys).generate(prompts, params)]

    together = drawn(PROMPTS, 3)
    assert together == [drawn(prompt, 3)[0] for prompt in PROMPTS]
    assert together == drawn(PROMPTS, 3, policy=FOUR["fcfs"]())
    assert all(a != b for a, b in zip(together, drawn(PROMPTS, 4), strict=True))
    unnamed = drawn(["a", "a"], None)
    assert unnamed[0] != unnamed[1] and unnamed == drawn(["a", "a"], None) != drawn(["a", "a"], None, sampling_seed=1)


def test_one_that_can_never_fit_is_rejected_alone(make, expected):
    llm = make(max_model_len=30, num_blocks=8)
    short, long, empty = llm.generate(["a", "fox " * 40, ""], SamplingParams(max_tokens=4))
    assert list(short.token_ids) == expected["a"][:4]
    assert long.finish_reason == "rejected" and "the pool holds 64" in long.stop_reason and long.text == ""
    assert empty.finish_reason == "rejected" and "0 prompt tokens" in empty.stop_reason


def test_one_that_fails_does_so_alone(make, expected, monkeypatch):
    llm = make()
    executor, execute = llm._setup.executor, llm._setup.executor.execute

    def faulty(batch):
        result = execute(batch)
        for i, request in enumerate(batch.requests()):
            if request.request_id == "1" and request.num_output_tokens == 3:
                result.failed[i] = "logits are not finite"
        return result

    monkeypatch.setattr(executor, "execute", faulty)
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert (found[1].finish_reason, found[1].stop_reason) == ("failed", "logits are not finite")
    assert list(found[1].token_ids) == expected[PROMPTS[1]][:3]
    assert all(list(g.token_ids) == expected[g.prompt] for g in found if g is not found[1])


def test_a_consumer_that_stops_withdraws_what_is_unfinished(make, expected):
    llm = make(enable_prefix_caching=False)
    pieces = llm.stream(PROMPTS, SamplingParams(max_tokens=24))
    assert isinstance(next(pieces), Piece)
    pieces.close()
    ledger = llm._engine.ledger
    assert llm._engine.num_unfinished == 0 and ledger.cache.num_free == LIMITS["num_blocks"]
    assert list(llm.generate("a", SamplingParams(max_tokens=24))[0].token_ids) == expected["a"]


# ---- the consumer's times ----


def test_a_recorded_stream_is_observed_at_the_client(make, tokenizer, tmp_path):
    stamps = {}
    with make(out=tmp_path / "run", store_text=True) as llm:
        for piece in llm.stream(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True)):
            stamps.setdefault(piece.request_id, []).append(piece.time_s)
        rejected = llm.generate("fox " * 100)
    assert rejected[0].finish_reason == "rejected"
    run = read_run(tmp_path / "run")
    assert run.result["measurement"]["observed_at"] == "client" and run.status == "finished"
    table, summary = run.requests, run.summary
    rows = [i for i, status in enumerate(table["status"]) if status == "finished"]
    names = [table["request_id"][i] for i in rows]
    assert sorted(names) == sorted(stamps) and table["status"].count("rejected") == 1
    assert table["first_token_s"][rows].tolist() == [stamps[name][0] for name in names]
    assert table["finished_s"][rows].tolist() == [stamps[name][-1] for name in names]
    assert all(table["arrival_s"][rows] < table["visible_s"][rows])
    gaps = np.concatenate([np.diff(times) for times in stamps.values()])
    assert summary["itl/mean"] == pytest.approx(gaps.mean(), abs=1e-6)
    assert summary["itl/max"] == pytest.approx(gaps.max(), abs=1e-6)
    assert summary["ttft/mean"] == pytest.approx(
        np.mean([stamps[name][0] - table["arrival_s"][i] for i, name in zip(rows, names, strict=True)])
    )
    assert (
        run.manifest["workload"]["requests"] == len(PROMPTS) + 1
        and run.manifest["labels"]["policy"] == "ChunkedPrefill"
    )
    with packed.opened(packed.find(tmp_path / "run", "outputs.jsonl")) as file:
        outputs = {row["request_id"]: row for row in map(json.loads, file)}
    assert all(outputs[name]["text"] == tokenizer.decode(outputs[name]["token_ids"]) for name in stamps)


def test_a_withdrawn_stream_is_recorded_as_aborted(make, tmp_path):
    with make(out=tmp_path / "run") as llm:
        pieces = llm.stream(["a", "fox"], SamplingParams(max_tokens=24, ignore_eos=True))
        next(pieces), next(pieces), next(pieces)
        pieces.close()
    table = read_run(tmp_path / "run").requests
    assert table["status"] == ["aborted", "aborted"]


def test_a_run_that_breaks_says_so(make, tmp_path):
    with pytest.raises(RuntimeError), make(out=tmp_path / "run"):
        raise RuntimeError("the consumer fell over")
    run = read_run(tmp_path / "run")
    assert run.status == "failed" and run.result["error"] == "the consumer fell over"


# ---- mistakes ----


def mistake(call):
    with pytest.raises(ConfigError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mistakes_are_one_line(make, tmp_path):
    plain = LLM("tiny", num_blocks=16, max_model_len=64)
    assert "expected token ids, as this model has no tokenizer" in mistake(lambda: plain.generate("hello"))
    assert "sampling.stop" in mistake(lambda: plain.generate([5, 6], SamplingParams(stop=("x",))))
    assert "expected token ids from 0 to 1023, found 1024" in mistake(lambda: plain.generate([5, 1024]))
    assert "found 1.7" in mistake(lambda: plain.generate([[1.7, 2]])) and "1.5" in mistake(
        lambda: plain.generate([1.5])
    )
    assert "expected one, or 2 for as many prompts, found 1" in mistake(
        lambda: make().generate(["a", "b"], [SamplingParams()])
    )
    assert mistake(lambda: LLM("tiny", dtype="fp32")).startswith("engine.dtype: expected one of float64, float32")
    assert "engine=tpu: expected cpu or cuda" in mistake(lambda: LLM("tiny", engine="tpu"))
    assert "engine=stub as it is set up needs clock=virtual" in mistake(lambda: LLM(engines.stub()))


@pytest.mark.parametrize(
    "key, value",
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5),
     ("max_tokens", 0), ("stop", "text"), ("stop", ("",))],
)  # fmt: skip
def test_sampling_that_cannot_be_done(key, value):
    assert f"sampling.{key}: expected" in mistake(lambda: SamplingParams(**{key: value}))
