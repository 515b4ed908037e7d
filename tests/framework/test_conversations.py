"""Sessions whose next prompt contains what was really generated: blocks that outlive a request must hold its tokens."""

import random

import numpy as np
import pytest
from four import ALL
from hypothesis import given
from hypothesis import strategies as st
from scripted import HOST_BLOCK_GIB, MS, PART, JumpingExecutor, check_all_tokens, lab

from schedlab.framework.content import SessionContent
from schedlab.framework.request import EngineRequest
from schedlab.framework.testing.chaos import Chaos


class Conversations:
    """A source: each turn's prompt is the turn before, its output, and new tokens, some time after its end."""

    def __init__(self, seed, sessions=4, turns=4, most_tokens=80, with_tokens=True):
        self.dice = random.Random(seed)
        self.turns, self.most_tokens, self.with_tokens = turns, most_tokens, with_tokens
        self.pending = [self._turn(f"s{i}", 0, self.dice.randint(0, 30) * MS, None) for i in range(sessions)]
        self.requests = list(self.pending)

    def _turn(self, session, number, arrival_ns, before):
        history, length = None, 0
        if before is not None:
            length = before.num_tokens
            if self.with_tokens:
                prompt_T = before.content.tokens(before.num_prompt_tokens, 1000)
                history = np.concatenate([prompt_T, np.array(before.output_token_ids, dtype=np.int64)])
        request = EngineRequest(
            f"{session}/{number}", arrival_ns, length + self.dice.randint(1, 12), SessionContent(session, history),
            recorded_output_tokens=self.dice.randint(1, 12), session=session,
        )  # fmt: skip
        return request

    def peek(self):
        return min((request.visible_ns for request in self.pending), default=None)

    def pop(self, now_ns):
        due = sorted((r for r in self.pending if r.visible_ns <= now_ns), key=lambda r: r.visible_ns)
        self.pending = [r for r in self.pending if r.visible_ns > now_ns]
        return due

    def finished(self, request, now_ns):
        session, number = request.request_id.split("/")
        if int(number) + 1 == self.turns or request.num_tokens + 24 > self.most_tokens:
            return
        following = self._turn(session, int(number) + 1, now_ns + self.dice.randint(0, 9) * MS, request)
        self.pending.append(following)
        self.requests.append(following)


def talk(policy, seed, num_blocks, **keys):
    source = Conversations(seed, with_tokens="executor" not in keys)
    made = lab(policy, [], source=source, num_blocks=num_blocks, swap_space_gib=10 * HOST_BLOCK_GIB, **keys)
    tables = made.finish()
    made.requests = {request.request_id: request for request in source.requests}
    return made, tables


@pytest.mark.parametrize("name", ["fcfs", "decode_priority/swap", "prefix_reuse", "prefix_reuse/swap", "chaos"])
@PART
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(21, 40))
def test_every_turn_generates_what_follows_from_its_conversation(name, seed, num_blocks):
    policy = Chaos(seed) if name == "chaos" else ALL[name]()
    made, _ = talk(policy, seed, num_blocks)
    check_all_tokens(made)
    assert {request.state for request in made.requests.values()} == {"finished"}


def test_conversations_do_reuse_what_was_generated():
    made, tables = talk(ALL["chunked_prefill"](), 1, 80)
    turns = [request for request in made.requests.values() if not request.request_id.endswith("/0")]
    assert turns and tables.summary["prefix/hit_rate"] > 0.5
    for request in turns:
        session, number = request.request_id.split("/")
        before = made.requests[f"{session}/{int(number) - 1}"]
        assert request.cached_tokens == (before.num_tokens - 1) // 4 * 4, "all whole blocks that were computed"


@PART
@given(seed=st.integers(0, 2**32))
def test_with_and_without_tokens_the_decisions_are_the_same(seed):
    """An executor that makes no tokens has the same identities, hence the same hits and batches."""
    digests = []
    for executor in (None, JumpingExecutor()):
        keys = {} if executor is None else {"executor": executor, "honour_holds": False}
        _, tables = talk(ALL["prefix_reuse"](), seed, 24, **keys)
        digests.append((tables.digest, tables.summary["prefix/tokens_reused"]))
    assert digests[0] == digests[1]
