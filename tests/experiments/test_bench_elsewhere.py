"""The bench's peers in environments of their own: a made-up worker tells lines, a made-up engine what is measured."""

import re
import sys

import pytest

from schedlab.experiments.bench import peer_worker
from schedlab.experiments.bench.cpu_engine import Case, one_round
from schedlab.experiments.bench.peer_process import WORKER, Elsewhere
from schedlab.framework.errors import ConfigError

FAKE = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["count"] == 13:
        print("loading", file=sys.stderr)
        sys.exit("out of luck")
    tokens = [[sum(p) + k for k in range(asked["count"])] for p in asked["prompts"]]
    stamps = [3.0 + k / 4 for k in range(asked["count"])]
    print(json.dumps({"tokens": tokens, "stamps": stamps, "seconds": stamps[-1] + 1}), flush=True)
"""


@pytest.fixture
def peer(tmp_path):
    worker = tmp_path / "fake.py"
    worker.write_text(FAKE)
    peer = Elsewhere("fake", "--fake", sys.executable, [], worker)
    yield peer
    peer.close()


def test_tokens_and_times_come_from_the_worker(peer):
    for _ in range(2):
        took, tokens = one_round(peer, Case("decoding", [[1, 2], [5]], 5, decode=True), timer=pytest.fail)
        assert tokens == [[3, 4, 5, 6, 7], [5, 6, 7, 8, 9]]
        assert took == pytest.approx(4 * 0.25)
        took, tokens = one_round(peer, Case("prefill", [[1, 2, 3]], 1), timer=pytest.fail)
        assert tokens == [[6]] and took == pytest.approx(4)


def test_a_worker_that_dies_is_one_line(peer):
    told = f"--fake {sys.executable}: fake ended with 1, its last line: out of luck"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        peer.generate([[1]], 13, pytest.fail)


@pytest.mark.parametrize(
    "python, says",
    [("/nowhere/python", "expected a Python with fake, found: No such file"), (sys.executable, "last line: KeyError")],
)
def test_a_python_that_cannot_work_is_one_line(python, says):
    with pytest.raises(ConfigError, match=rf"^--fake {python}: .*{says}[^\n]*$"):
        Elsewhere("fake", "--fake", python, ["nowhere", "float32", "1"], WORKER)


def test_what_a_worker_measures():
    """The step that gave a token to one of two sequences is in the whole, and is no stamp."""
    clock = iter([10.0, 11.0, 13.0, 16.0])

    def steps(prompts, count):
        yield {}
        yield {0: [7]}
        yield {0: [8], 1: [9]}
        yield {0: [5], 1: [6]}

    answer = peer_worker.served(steps, lambda: next(clock), [[1], [2]], 3)
    assert answer == {"tokens": [[7, 8, 5], [9, 6]], "stamps": [3.0, 6.0], "seconds": 6.0}
