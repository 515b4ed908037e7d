"""Tab in the shell: what `schedlab complete` answers, and that bash does with it what a user sees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ASK = """
COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; COMP_WORDBREAKS={breaks}; COMPREPLY=()
_schedlab 2>/dev/null; printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def complete(schedlab):
    def ask(line: str) -> list[str]:
        done = schedlab("complete", line)
        assert done.code == 0, done.err
        return done.out.split()

    return ask


def test_commands(complete):
    assert {"run", "compare", "generate", "trace", "model"} <= set(complete("schedlab "))
    assert complete("schedlab comp") == ["compare", "completion"]  # not the hidden one
    assert complete("schedlab trace con") == ["convert"]


def test_options_of_plain_commands(complete):
    assert complete("schedlab trace convert a b --time") == ["--time-scale", "--time-unit"]
    assert complete("schedlab compare ") == []  # files: the shell knows better


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("schedlab run polic", ["policy.", "policy="]),
        ("schedlab run policy=chunked", ["policy=chunked_prefill"]),
        ("schedlab run -m policy=fcfs,chunk", ["policy=fcfs,chunked_prefill"]),
        ("schedlab run policy=chunked_prefill policy.chunk", ["policy.chunk_size="]),
        ("schedlab run engine=virtual engine.max_num_s", ["engine.max_num_seqs="]),
        ("schedlab run hydra/launcher=po", ["hydra/launcher=pool"]),
        ("schedlab run --inf", ["--info"]),
        ("schedlab roofline hardware=h2", ["hardware=h200"]),
    ],
)
def test_words_of_hydra(complete, line, told):
    assert complete(line) == told


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `schedlab` is this one."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "schedlab").write_text(f'#!/bin/sh\nexec {sys.executable} -m schedlab "$@"\n')
    (folder / "schedlab").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
def test_bash_replaces_what_follows_the_last_equals_sign(path, tmp_path):
    breaks = "$' \\t\\n\"\\'><=;|&(:'"
    asked = "".join(
        ASK.format(line=line, breaks=breaks if equals else "' '")
        for line, equals in [("schedlab run policy=fc", True), ("schedlab run policy=fc", False)]
    )
    script = f'eval "$(schedlab completion bash)"\n{asked}'
    done = subprocess.run(["bash", "-c", script], env=path, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["fcfs", "policy=fcfs"], done.stderr


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh here")
def test_zsh_accepts_its_script(path, tmp_path):
    script = 'autoload -U compinit && compinit -u\neval "$(schedlab completion zsh)"\nwhence _schedlab'
    done = subprocess.run(["zsh", "-fc", script], env=path, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "_schedlab", done.stderr


def test_another_shell_is_a_mistake(schedlab):
    done = schedlab("completion", "fish")
    assert done.code == 2 and "expected bash or zsh" in done.err


def test_a_local_yaml_is_offered(complete, workspace):
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/mine.yaml").write_text("_target_: mine.Mine\n")
    assert complete("schedlab run policy=mi") == ["policy=mine"]
