"""Requests that fail: nobody else is disturbed, and nothing of theirs is kept."""

from dataclasses import replace

import pytest
from four import FOUR
from scripted import (
    MS,
    Script,
    Told,
    check_all_tokens,
    grants,
    heard,
    ids,
    lab,
    named,
    serve,
)

from schedlab.framework.content import SessionContent
from schedlab.framework.policy import Finished
from schedlab.framework.request import EngineRequest
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.harness import Spec

# -- failures ---------------------------------------------------------------------------------------------------------


class Failing(StubExecutor):
    """Reports that the named request failed in its n-th grant."""

    def __init__(self, name, grant):
        super().__init__()
        self._name, self._left = name, grant

    def execute(self, batch):
        result = super().execute(batch)
        requests = ids(batch.requests())
        if self._name in requests:
            self._left -= 1
            if not self._left:
                result.failed[requests.index(self._name)] = "out of luck"
        return result


def whoever_is_left(*names):
    """A move that grants each of `names` that still runs four tokens or what it has left."""

    def move(step):
        running = named(step)
        for name in names:
            assert name not in running or step.grant(running[name], 4)

    return move


FAILS = {"first chunk": 1, "second chunk": 2, "last chunk": 3, "first decode": 4, "third decode": 6}


@pytest.mark.parametrize("case", FAILS)
@pytest.mark.parametrize("name", ["first", "it", "last"])
def test_a_failed_request_disturbs_nobody(case, name):
    """Three equal prompts of three chunks in each step, decoded one by one and in bulk; `name` fails."""
    ids_ = {"first": (1, 2, 9), "it": (1, 2, 8), "last": (1, 2, 7)}
    trace = [Spec(n, 0, 12, 6, ids=i, id_width=4) for n, i in ids_.items()] + [Spec("d", 0, 4, 12)]
    chunk = whoever_is_left("d", "first", "it", "last")
    moves = [grants(d=4, first=4, it=4, last=4), chunk, chunk, lambda step: step.grant_decodes()]
    moves += [whoever_is_left("d", "last", "it", "first"), whoever_is_left("it", "first", "d", "last")]
    source = Told([spec.request() for spec in trace])
    made = lab(Script(*moves), source.requests, source=source, executor=Failing(name, FAILS[case]))
    tables = made.finish()
    check_all_tokens(made)
    assert made[name].state == "failed" and made[name].reason == "out of luck"
    assert {made[other].state for other in ("first", "it", "last", "d") if other != name} == {"finished"}
    assert tables.summary["requests/failed"] == 1 and tables.summary["requests/finished"] == 3
    assert source.told == dict.fromkeys(("first", "it", "last", "d"), 1)


@pytest.mark.parametrize("grant", [1, 2, 3, 4, 6])
def test_a_failure_without_tokens_is_the_same(grant):
    """An executor that makes no tokens ends requests by their lengths alone, at the same steps."""

    class Silent(Failing):
        def execute(self, batch):
            return replace(super().execute(batch), tokens=None)

    ends = []
    for executor in (Failing("b", grant), Silent("b", grant)):
        made = lab(FOUR["chunked_prefill"](), [Spec(n, 0, 9, 5) for n in "abc"], executor=executor)
        made.finish()
        stamps = [(r.state, r.finished_ns, r.num_output_tokens, r.num_computed_tokens) for r in made.requests.values()]
        ends.append(stamps)
    assert ends[0] == ends[1] and ends[0][1][0] == "failed"


def test_what_failed_is_never_published():
    """b has the same prompt: it finds the first chunk of a, which went well, and nothing of the second."""
    seen = []

    def look(step):
        seen.append(step.cached_tokens(named(step)["b"]))
        serve(step)

    trace = [Spec(n, 0, 17, 2, ids=(1, 2, 3, 4, 5), id_width=4) for n in "ab"]
    made = lab(Script(grants(a=5), grants(a=None), look), trace, executor=Failing("a", 2))
    made.finish()
    assert seen == [4] and made["a"].state == "failed"
    check_all_tokens(made)


def test_the_output_of_a_failed_turn_is_never_published():
    for fails, hit in ((99, 16), (5, 12)):
        turn = EngineRequest("turn", 0, 12, SessionContent("s"), recorded_output_tokens=7, session="s")
        following = EngineRequest("following", 30 * MS, 30, SessionContent("s"), recorded_output_tokens=2, session="s")
        made = lab(Script(), [turn, following], executor=Failing("turn", fails))
        made.finish()
        assert following.cached_tokens == hit


def test_a_failure_is_told_like_any_other_end():
    """Progressed first, then Finished in batch order."""
    trace = [Spec(n, 0, 4, 1) for n in ("a", "it", "c")]
    made = lab(Script(), trace, executor=Failing("it", 1))
    made.finish()
    assert [type(e).__name__ for e in made.policy.events][-4:] == ["Progressed", "Finished", "Finished", "Finished"]
    assert heard(made, Finished) == [("Finished", "a"), ("Finished", "it"), ("Finished", "c")]


def test_every_terminal_state_reaches_the_source_once():
    trace = [
        Spec("finished", 0, 8, 3),
        Spec("rejected", 0, 900, 3),
        Spec("aborted", 0, 8, 30, abort_ns=3 * MS),
        Spec("capped", 0, 8, 900, live=True),
        Spec("failed", 0, 8, 9),
    ]
    source = Told([spec.request() for spec in trace])
    made = lab(Script(), source.requests, source=source, executor=Failing("failed", 3), max_model_len=40)
    made.finish()
    assert source.told == dict.fromkeys([spec.name for spec in trace], 1)
    states = [made[spec.name].state for spec in trace]
    assert states == ["finished", "rejected", "aborted", "length_capped", "failed"]
