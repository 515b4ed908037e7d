"""A peer that lives in an environment of its own: `peer_worker.py` under that environment's Python, asked in JSON."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from schedlab.framework.errors import ConfigError

WORKER = Path(__file__).with_name("peer_worker.py")
OPTIONS = {"vllm": "--vllm", "llama.cpp": "--llama"}
"""Names of peers, and the option of the command line that gives the Python to run each with."""


class Elsewhere:
    """`python` is what `option` gave. Whatever keeps the worker from answering is a ConfigError of one line."""

    def __init__(self, name: str, option: str, python: str, words: list[str], worker: Path = WORKER) -> None:
        self.name = name
        self._told = f"{option} {python}"
        self._now = 0.0
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        command = [python, "-I", str(worker), name, *words]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        except OSError as error:
            raise ConfigError(f"{self._told}: expected a Python with {name}, found: {error.strerror}") from None
        self._answer()

    def timer(self) -> float:
        """The worker's own: it stands still but for the time that an answer says has passed."""
        return self._now

    def generate(self, prompts: list[list[int]], count: int, stamp: Callable[[], None]) -> list[list[int]]:
        answer = self._answer(json.dumps({"prompts": prompts, "count": count}) + "\n")
        begin = self._now
        for after in answer["stamps"]:
            self._now = begin + after
            stamp()
        self._now = begin + answer["seconds"]
        tokens: list[list[int]] = answer["tokens"]
        return tokens

    def close(self) -> None:
        """The end of its input is the worker's end."""
        self._process.communicate()
        self._errors.close()

    def _answer(self, question: str = "") -> Any:
        """The next line of the worker, parsed."""
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):  # then nothing comes back
            self._process.stdin.write(question)
            self._process.stdin.flush()
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        said = [line for line in self._errors if line.strip()] or ["nothing"]
        raise ConfigError(f"{self._told}: {self.name} ended with {code}, its last line: {said[-1].strip()}")


def elsewhere(given: Mapping[str, str | None], words: list[str]) -> list[Elsewhere]:
    """Those of the peers whose Python is `given` by name; `words`: model directory, dtype, number of threads."""
    return [Elsewhere(name, option, python, words) for name, option in OPTIONS.items() if (python := given[name])]
