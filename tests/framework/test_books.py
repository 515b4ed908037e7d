"""A step over books that are not the engine's own: the same verbs, refusals and texts over another's queues."""

import pytest
from four import ALL

from schedlab.framework.books import Books, Quote
from schedlab.framework.errors import PolicyError
from schedlab.framework.limits import set_limits
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import MaxPredictor
from schedlab.framework.step import Step
from schedlab.framework.testing.harness import TINY, Spec, run


class Mirrored(Books):
    """Counts each request by itself, as other schedulers do, and owns numbers of blocks instead of blocks."""

    def __init__(self, block_size=4, blocks=24, slots=6):
        super().__init__(block_size)
        self.free, self.slots = blocks, slots
        self.waiting, self.running, self.gone = [], [], []
        self.table, self.granted = {}, {}

    def views(self):
        decoding = tuple(r for r in self.running if self.decodes(r))
        return tuple(self.waiting), tuple(r for r in self.running if r not in decoding), decoding

    def running_view(self):
        return tuple(self.running)

    num_free_slots = property(lambda self: self.slots)
    num_free_blocks = property(lambda self: self.free)
    reserved_blocks = property(lambda self: self.watermark_blocks if self.running else 0)

    def quote(self, request):
        return Quote(request.num_computed_tokens, 0, self.table.get(request, 0), self.block_size)

    def take_changed(self):
        return list(self.waiting)

    def admit(self, request, quote, tokens):
        self.slots -= 1
        self.extend(request, quote, tokens)

    def extend(self, request, quote, tokens):
        need = max(quote.blocks(tokens), 0)
        self.free -= need
        self.table[request] = self.table.get(request, 0) + need
        self.granted[request] = quote.start + tokens

    def _drop(self, request):
        self.free += self.table.pop(request)
        self.slots += 1
        self.granted.pop(request, None)

    def withdraw(self, request):
        self._drop(request)
        return "recompute"

    def preempt(self, request, mode):
        self._drop(request)
        self.running.remove(request)
        request.mirror("preempted", request.num_tokens, 0)
        self.gone.append(request)
        return "recompute"

    def execute(self, policy, now_ns):
        """One step: grants compute, whoever has nothing left to compute emits."""
        self.gone = []
        step = Step(self, type(policy).__name__, len(policy.steps), now_ns, TINY.max_num_batched_tokens)
        policy.schedule(step)
        admitted = step.close().admitted
        self.waiting = sorted([*self.waiting, *self.gone], key=lambda r: r.order)
        for request in admitted:
            self.waiting.remove(request)
            self.running.append(request)
        for request, computed in list(self.granted.items()):
            tokens = request.num_tokens + (computed == request.num_tokens)
            request.mirror("running", tokens, computed)
            if tokens >= request.final_tokens:
                self._drop(request)
                self.running.remove(request)
                request.mirror("finished", tokens, computed)
        self.granted = {}


class Noting(Policy):
    """Hands the step on and keeps what was decided: when, grants in batch order, victims."""

    def __init__(self, policy):
        self.policy, self.steps = policy, []

    def schedule(self, step):
        self.policy.schedule(step)
        made = step._decision
        grants = [(prefill.request.request_id, prefill.tokens) for prefill in made.prefills]
        decodes = [(request.request_id, 1) for request in made.decodes]
        batch = grants[: made.decodes_at] + decodes + grants[made.decodes_at :]
        self.steps.append((made.now_ns, batch, [(victim.request_id, mode) for victim, mode, _ in made.preempted]))


def requests(specs):
    for order, spec in enumerate(specs):
        request = spec.request()
        set_limits(request, TINY)
        request.order = order
        yield request


CROWD = [Spec(f"r{i}", 0, 5 + 3 * i, 3 + 5 * (i % 3)) for i in range(9)]
"""More than 24 blocks of 4 tokens hold at once: victims must be found."""


@pytest.mark.parametrize("name", [name for name in ALL if type(ALL[name]()).observe is Policy.observe])
def test_a_policy_decides_the_same_over_other_books(name):
    ours, theirs = Noting(ALL[name]()), Noting(ALL[name]())
    run(ours, CROWD, enable_prefix_caching=False, honour_holds=False, predictor=MaxPredictor())
    books = Mirrored()
    books.waiting = list(requests(CROWD))
    for request in books.waiting:
        request._predicted = MaxPredictor().predict(request)
    for now_ns, _, _ in ours.steps:
        books.execute(theirs, now_ns)
    assert theirs.steps == ours.steps and not (books.waiting or books.running)
    if name == "fcfs":
        assert any(victims for _, _, victims in ours.steps), "the pool was to be too small"


def test_refusals_and_texts_are_the_steps_own():
    books = Mirrored(blocks=3, slots=1)
    first, second = requests([Spec("a", 0, 20, 4), Spec("b", 0, 4, 4)])
    books.waiting = [first, second]
    step = Step(books, "Any", 0, 0, 32)
    assert step.fits(first) == 12 and step.blocks_needed(first, 13) == 4
    assert step.grant(first).refusal == "memory" and step.grant(first, 0).refusal == "budget"
    assert step.grant(first, 9) == (9, None) and step.free_blocks == 0
    assert step.grant(second).refusal == "slots"
    with pytest.raises(PolicyError, match="policy Any on request a: a second grant in one step"):
        step.grant(first)
    assert step.preempt(first) == "recompute" and step.free_blocks == 3 and step.free_slots == 1
    with pytest.raises(PolicyError, match="grant_decodes takes decoding requests only"):
        step.grant_decodes([second])
