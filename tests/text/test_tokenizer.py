"""Text to tokens and back, text that comes token by token, and stop strings, against decoding everything at once."""

import random
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_text import VOCAB, save_tokenizer

from schedlab.framework.errors import ModelError
from schedlab.framework.model.tokenizer import TextStream, Tokenizer

TEXTS = st.text(alphabet=st.sampled_from("ab c.\n1é東🙂"), max_size=40)


@pytest.fixture(scope="module")
def tokenizer(model_directory):
    return Tokenizer(model_directory, VOCAB)


def streamed(tokenizer, token_ids, stops=()):
    stream = TextStream(tokenizer, stops)
    parts = []
    for token in token_ids:
        parts.append(stream.push(token))
        if stream.stopped_by is not None:
            break
    parts.append(stream.end())
    assert "".join(parts) == stream.text
    return stream, parts


@given(text=TEXTS)
def test_text_survives_its_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=TEXTS)
def test_streamed_text_is_the_text(tokenizer, text):
    stream, parts = streamed(tokenizer, tokenizer.encode(text))
    assert stream.text == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)


def test_streamed_text_of_any_tokens_is_what_they_decode_to(tokenizer):
    """Random tokens are mostly no valid UTF-8."""
    draw = random.Random(0)
    for _ in range(200):
        token_ids = [draw.randrange(300) for _ in range(draw.randrange(30))]
        stream, _ = streamed(tokenizer, token_ids)
        assert stream.text == tokenizer.decode(token_ids)


@given(text=TEXTS, stops=st.lists(st.text(alphabet="ab c.é東", min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_stop_string_cuts_the_text_where_it_first_stands(tokenizer, text, stops):
    stream, _ = streamed(tokenizer, tokenizer.encode(text), stops)
    found = [text.find(stop) for stop in stops if stop in text]
    assert (stream.stopped_by is None) == (not found)
    assert stream.text == (text[: min(found)] if found else text)


def test_what_may_become_a_stop_string_is_held_back(tokenizer):
    stream = TextStream(tokenizer, ("cab",))
    handed = [stream.push(token) for letter in "abcaab" for token in tokenizer.encode(letter)]
    assert handed == ["a", "b", "", "", "caa", "b"]


def test_half_a_character_is_held_back(tokenizer):
    token_ids = tokenizer.encode("é🙃")  # an emoji that no merge covers
    stream = TextStream(tokenizer)
    handed = [stream.push(token) for token in token_ids]
    assert len(token_ids) > 2 and "" in handed and "".join(handed) == "é🙃"


def test_marks_are_no_text(tokenizer):
    assert tokenizer.decode([1, *tokenizer.encode("fox"), 2]) == "fox"


def test_chat_is_what_the_template_makes_of_it(tokenizer):
    token_ids = tokenizer.encode([{"role": "user", "content": "hi"}])
    assert tokenizer.encode("hi", chat=True) == token_ids
    assert token_ids[0] == 1 and token_ids.count(1) == 2 and token_ids.count(2) == 1
    assert tokenizer.decode(token_ids) == "user\nhi\nassistant\n"


# ---- faults: one line each ----


def fault(path, vocab_size=None, use=lambda tokenizer: None):
    with pytest.raises(ModelError) as caught:
        use(Tokenizer(path, vocab_size))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path):
    """It serves every text but one that uses such a token."""
    path, fits = save_tokenizer(tmp_path, extra=200), "ab"
    with pytest.warns(UserWarning, match=f"the tokenizer has token ids up to .*, the model {VOCAB}:"):
        tokenizer = Tokenizer(path, VOCAB)
    every = Tokenizer(path)
    assert tokenizer.encode(fits) == every.encode(fits)
    beyond = next(text for text, token in every._tokenizer.get_vocab().items() if token >= VOCAB)
    assert max(every.encode(beyond)) >= VOCAB
    with pytest.raises(ModelError, match=f"expected token ids below its vocab_size of {VOCAB}, found "):
        tokenizer.encode(beyond)


def test_no_tokenizer(tmp_path):
    assert "expected a tokenizer (tokenizer.json or tokenizer.model), found none" in fault(tmp_path)


def test_no_directory(tmp_path):
    assert "expected a Hugging Face model directory" in fault(tmp_path / "nowhere")


def test_a_damaged_tokenizer(model_directory, tmp_path):
    shutil.copytree(model_directory, tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    assert f"{tmp_path}: the tokenizer cannot be loaded" in fault(tmp_path)


def test_no_chat_template(tmp_path):
    save_tokenizer(tmp_path, template=None)
    assert "has no chat template" in fault(tmp_path, use=lambda tokenizer: tokenizer.encode("hi", chat=True))


def test_a_template_that_refuses(tmp_path):
    save_tokenizer(tmp_path, template="{{ raise_exception('no system message, please') }}")
    message = fault(tmp_path, use=lambda tokenizer: tokenizer.encode("hi", chat=True))
    assert message.endswith("refuses these messages: no system message, please")


def test_a_model_that_was_never_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message = fault("fetched:smollm2")
    assert "schedlab model fetch smollm2" in message and str(tmp_path) in message
    assert "expected one of smollm2" in fault("fetched:other")


def test_a_hub_that_cannot_be_reached(monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert fault("someone/some-model").endswith("no hub gave that model: no route")
