"""Tab in the shell: what `schedlab complete` answers, and that bash does with it what a user sees."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
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
def test_zsh_completes_what_is_typed(path, tmp_path):
    """At a terminal, as a user sees it: what belongs to another command before it does not count."""
    (tmp_path / "rows.csv").touch()
    shell = Typed(["zsh", "-f", "-i"], {**path, "TERM": "dumb"}, tmp_path)
    try:
        shell.type("autoload -U compinit && compinit -u -D\n", "")
        shell.type('eval "$(schedlab completion zsh)"; PS1="R""EADY>"\n', "READY>")
        shell.type("schedlab run policy=fc\t", "policy=fcfs ")
        shell.type("\x15: && schedlab run policy=chunked_prefill policy.chu\t", "nk_size=")
        shell.type("\x15schedlab comp\t", "compare +completion")
        shell.type("\x15schedlab trace info ro\t", "rows.csv ")
    finally:
        shell.close()


class Typed:
    """A program at a terminal of its own."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self._terminal, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)

    def type(self, text: str, answer: str, within_s: float = 90) -> None:
        """Type, and wait until the terminal shows what matches `answer`."""
        os.write(self._terminal, text.encode())
        shown, until = b"", time.monotonic() + within_s
        while not re.search(answer.encode(), shown):
            assert time.monotonic() < until, shown
            if select.select([self._terminal], [], [], 0.2)[0]:
                shown += os.read(self._terminal, 4096)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


def test_another_shell_is_a_mistake(schedlab):
    done = schedlab("completion", "fish")
    assert done.code == 2 and "expected bash or zsh" in done.err


def test_a_local_yaml_is_offered(complete, workspace):
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/mine.yaml").write_text("_target_: mine.Mine\n")
    assert complete("schedlab run policy=mi") == ["policy=mine"]
