"""Policies that see programs: the order of their requests, what service is, and the contract."""

import pytest
from scripted import MS, ScriptedExecutor

from schedlab.framework.policy import Arrived, Finished
from schedlab.framework.testing.conformance import assert_conforms
from schedlab.framework.testing.harness import Spec, run
from schedlab.policies.program_fcfs import ProgramFCFS
from schedlab.policies.program_feedback import ProgramFeedback
from schedlab.policies.program_las import ProgramLAS
from schedlab.policies.program_service import ProgramService, program_of


def admitted(policy, trace, **keys):
    """Names in the order of their first grant, on an engine with one slot."""
    outcome = run(policy, trace, max_num_seqs=1, executor=ScriptedExecutor(1), **keys)
    return [r.request_id for r in sorted(outcome.requests, key=lambda r: r.first_scheduled_ns)]


OLD_AND_NEW = [
    Spec("old1", 0, 4, 6, session="old"),
    Spec("new1", 1 * MS, 4, 6, session="new"),
    Spec("lone", 2 * MS, 4, 2),
    Spec("old2", 3 * MS, 4, 2, session="old"),
    Spec("new2", 4 * MS, 4, 2, session="new"),
]


def test_an_older_program_goes_first():
    assert admitted(ProgramFCFS(), OLD_AND_NEW) == ["old1", "old2", "new1", "new2", "lone"]


def test_a_program_that_has_had_little_goes_first():
    assert admitted(ProgramLAS(), OLD_AND_NEW) == ["old1", "new1", "lone", "old2", "new2"]
    assert admitted(ProgramLAS(patience_s=0.001), OLD_AND_NEW) == ["old1", "new1", "lone", "old2", "new2"]


def test_a_program_sinks_as_a_whole():
    knobs = {"quantum": 4, "prompt_weight": 0.0, "preempt_mode": "recompute"}
    trace = [Spec("a1", 0, 4, 9, session="a"), Spec("a2", 20 * MS, 4, 3, session="a"), Spec("b", 20 * MS, 4, 3)]
    assert admitted(ProgramFeedback(**knobs), trace) == ["a1", "b", "a2"]


def ended(name, session, prompt, output):
    request = Spec(name, 0, prompt, output, session=session).request()
    request.mirror("finished", prompt + output, prompt + output - 1)
    request.see_at_client(1)
    return request


def test_service_is_a_sum_or_the_longest_chain():
    for by, expected in (("sum", 4 + 6 + 8), ("critical_path", 4 + 8)):
        service = ProgramService(prompt_weight=0.0, by=by)
        root, left, right = (ended(n, "p", 10, output) for n, output in (("root", 4), ("left", 6), ("right", 8)))
        service.observe(Arrived(root))
        assert service.observe(Finished(root))
        service.observe(Arrived(left))
        service.observe(Arrived(right))
        service.observe(Finished(left))
        service.observe(Finished(right))
        join = Spec("join", 0, 10, 1, session="p").request()
        service.observe(Arrived(join))
        assert service.of(join) == expected
        alone = Spec("alone", 0, 10, 1).request()
        assert service.of(alone) == 0 and program_of(alone) == (False, "alone")
    weighted = ProgramService(prompt_weight=0.5)
    weighted.observe(Finished(ended("a", "p", 10, 4)))
    assert weighted.of(Spec("b", 0, 10, 1, session="p").request()) == 4 + 5 + 5, "its own prompt too"


def test_wrong_knobs_are_named():
    with pytest.raises(ValueError, match=r"policy\.service: expected sum or critical_path, found 'max'"):
        ProgramLAS(service="max")
    with pytest.raises(ValueError, match=r"policy\.patience_s"):
        ProgramLAS(patience_s=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ProgramFCFS(chunk_size=12),
        lambda: ProgramLAS(chunk_size=12, patience_s=0.05, service="critical_path"),
        lambda: ProgramFeedback(chunk_size=12, quantum=2, prompt_weight=0.1, promote_after_s=0.05),
    ],
    ids=["program_fcfs", "program_las", "program_feedback"],
)
def test_the_contract(make):
    assert_conforms(make, seconds=1.5)
