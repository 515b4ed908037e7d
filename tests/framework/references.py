"""Every policy once more, from its docstring alone: all is sorted and counted anew in every step, nothing is kept.

Each function decides one step for the policy whose knobs it is given. Uses the verbs of the step and nothing that
policies share.
"""

from fractions import Fraction

from schedlab.framework.policy import Aborted, Admitted, Arrived, Finished, Policy, Preempted
from schedlab.policies import victims

# -- who makes room ---------------------------------------------------------------------------------------------------


def alive(step):
    return [request for request in step.running if request.state == "running"]


def up_to(line, requester):
    return line[: line.index(requester)] if requester in line else line


def descending(requests, rank):
    """Largest first, the last of equals before the others."""
    return [r for _, _, r in sorted(((rank(r), i, r) for i, r in enumerate(requests)), reverse=True)]


def newest(step, requester):
    return up_to(list(reversed(alive(step))), requester)


def of_largest(rank):
    return lambda step, requester: up_to(descending(alive(step), rank), requester)


def sparing_the_oldest(line):
    """`line` is a function from running requests to the order in which they go."""
    return lambda step, requester: up_to([r for r in line(alive(step)) if r is not alive(step)[0]], requester)


VICTIMS = {
    victims.newest: newest,
    victims.oldest: sparing_the_oldest(lambda requests: requests),
    victims.most_computed: sparing_the_oldest(lambda requests: descending(requests, lambda r: r.num_computed_tokens)),
    victims.least_computed: sparing_the_oldest(lambda requests: descending(requests, lambda r: -r.num_computed_tokens)),
}


def throw_out(step, knobs, victim):
    mode = knobs.preempt_mode
    if mode == "auto":
        tokens, ask = victim.num_computed_tokens, knobs.estimator
        mode = "recompute" if ask.step_s(tokens) <= ask.copy_s(tokens) + ask.copy_s(tokens) else "swap"
    step.preempt(victim, mode)


def insist(step, knobs, request, tokens, line):
    """`tokens` at most to `request`, at the expense of those in `line`, one after another."""
    line = list(line)
    while not (grant := step.grant(request, tokens)) and grant.refusal == "memory" and line:
        throw_out(step, knobs, line.pop(0))
    return grant.tokens


# -- what a step consists of ------------------------------------------------------------------------------------------


def uncached(step, request):
    return request.num_tokens - step.cached_tokens(request)


def admissible(step, request, spare=0):
    """A slot is free, and blocks for all of `request` with the larger of the two margins beside them."""
    margin = max(step.watermark_blocks, spare if step.running else 0)
    return step.free_slots >= 1 and step.free_blocks - step.blocks_needed(request, uncached(step, request)) >= margin


def decode(step, knobs, line, limit=10**9):
    """First everybody who has a block, then the others at the expense of `line` or, in the end, of themselves."""
    asked = [r for r in step.decoding if r.state == "running"]
    left_out = len(step.decoding) > limit
    lacking = [r for r in (asked[:limit] if left_out else asked) if not step.grant(r)]
    for request in lacking:
        if (
            request.state == "running"
            and step.token_budget
            and not insist(step, knobs, request, 1, line(step, request))
        ):
            throw_out(step, knobs, request)
    return not left_out and not lacking


def go_on(step, knobs, request, room, line):
    """What fits of a running prompt; if nothing does, as much as there is room for, at the expense of `line`."""
    fits = step.fits(request)
    return insist(step, knobs, request, min(fits, room) if fits else room, line(step, request))


def go_on_with_all(step, knobs, room, line):
    before = room
    for request in step.prefilling:
        if room and request.state == "running":
            room -= go_on(step, knobs, request, room, line)
    return before - room


def admit(step, order, room, spare=0):
    before = room
    for request in order:
        if not room or not admissible(step, request, spare):
            break
        grant = step.grant(request, room)
        room -= grant.tokens
        if not grant:
            break
    return before - room


def mixed(step, knobs, order, chunk, line):
    """Decodes, running prompts and, unless anybody was short of a block, waiting ones."""
    budget = step.token_budget
    undisturbed = decode(step, knobs, line, chunk)
    room = min(chunk, budget) - (budget - step.token_budget)
    room -= go_on_with_all(step, knobs, room, line)
    if undisturbed and room and step.free_slots:
        admit(step, order(step), room)


def by_turns(step, knobs, rank, chunk, line):
    """Decodes, then running and waiting prompts together by rank, running ones before equals.

    A waiting one that does not fit, or a running one that finds no free block, ends admission.
    """
    budget = step.token_budget
    admitting = decode(step, knobs, line, chunk)
    room = min(chunk, budget) - (budget - step.token_budget)
    prompts = list(step.prefilling)
    for request in sorted([*prompts, *step.waiting], key=rank):
        if not room:
            break
        if request.state == "running" and request in prompts:
            admitting = admitting and step.fits(request) > 0
            room -= go_on(step, knobs, request, room, line)
        elif request not in prompts and admitting:
            admitting = admissible(step, request)
            room -= step.grant(request, room).tokens if admitting else 0


def displace(step, knobs, head, rank):
    """Lower ranks than the head's go, the lowest and newest first, until it could be admitted."""
    for victim in descending([r for r in alive(step) if rank(r) > rank(head)], rank):
        if not admissible(step, head):
            throw_out(step, knobs, victim)


def with_reservations(step):
    """Waiting requests, as long as every running and every taken one could still generate its `max_tokens`."""

    def worst_case(request):
        tokens = request.num_prompt_tokens + request.max_tokens - 1
        return step.blocks_needed(request, max(tokens - request.num_computed_tokens, 0))

    reserved = sum(worst_case(request) for request in alive(step))
    room, taken = step.free_blocks, 0
    for request in step.waiting:
        blocks = worst_case(request)
        if reserved + blocks > room and (step.running or taken):
            return
        reserved, taken = reserved + blocks, taken + 1
        yield request


def patient_first(step, requests, patience_s):
    """Who arrived `patience_s` ago, by arrival; then the others of `requests`."""
    overdue = [r for r in step.waiting if step.now - patience_s >= r.arrival_s]
    yield from overdue
    yield from (r for r in requests if r not in overdue)


# -- the policies -----------------------------------------------------------------------------------------------------


def fcfs(step, knobs, line):
    if go_on_with_all(step, knobs, step.token_budget, line):
        return
    taken = []
    for request in step.waiting:
        if not admissible(step, request) or (taken and uncached(step, request) > step.token_budget):
            break
        step.grant(request)
        taken.append(request)
        if not step.token_budget:
            break
    if not taken:
        decode(step, knobs, line)


def chunked_prefill(step, knobs, line):
    mixed(step, knobs, lambda step: step.waiting, knobs.chunk_size, line)


class DecodePriority:
    streak = 0

    def __call__(self, step, knobs, line):
        undisturbed = decode(step, knobs, line)
        if step.decoding and self.streak == knobs.max_prefill_streak:
            self.streak = 0
            return
        room = step.token_budget
        if step.decoding:
            room = min(room, knobs.stall_tokens)
        taken = go_on_with_all(step, knobs, room, line)
        if undisturbed:
            taken += admit(step, step.waiting, room - taken, knobs.watermark_blocks)
        self.streak = min(self.streak + 1, knobs.max_prefill_streak) if taken else 0


def prefix_reuse(step, knobs, line):
    def order(step):
        score = {r: knobs.aging_tokens_per_s * r.arrival_s - step.cached_tokens(r) for r in step.waiting}
        return (r for r in sorted(score, key=score.get) if step.pending_tokens(r) == 0)

    mixed(step, knobs, order, knobs.chunk_size, line)


def work(step, request, output_weight):
    predicted = request.predicted_output_tokens
    to_come = (predicted if predicted is not None else request.max_tokens) - request.num_output_tokens
    return uncached(step, request) + output_weight * max(to_come, 0)


def sjf(step, knobs, line):
    def order(step):
        rate = knobs.aging_tokens_per_s
        return sorted(step.waiting, key=lambda r: work(step, r, knobs.output_weight) + rate * r.arrival_s)

    mixed(step, knobs, order, knobs.chunk_size, line)


def hrrn(step, knobs, line):
    def order(step):
        claim = {r: (step.now - r.arrival_s) / work(step, r, knobs.output_weight) for r in step.waiting}
        return sorted(claim, key=lambda r: -claim[r])

    mixed(step, knobs, order, knobs.chunk_size, line)


def priority(step, knobs, line):
    def level(request):
        return -request.priority

    def rank(request):
        return -request.priority, request.arrival_s

    if knobs.preempt_running and step.waiting:
        displace(step, knobs, min(step.waiting, key=rank), level)
    by_turns(step, knobs, rank, knobs.chunk_size, of_largest(level))


def edf(step, knobs, line):
    def due(request):
        return request.arrival_s + knobs.default_deadline_s if request.deadline_s is None else request.deadline_s

    by_turns(step, knobs, due, knobs.chunk_size, of_largest(due))


def multilevel_feedback(step, knobs, line):
    now = step.now

    def level(request):
        if request.arrival_s <= now - knobs.promote_after_s:
            return 0
        service = request.num_output_tokens + Fraction(knobs.prompt_weight) * request.num_prompt_tokens
        return next((i for i in range(knobs.num_levels) if service <= knobs.quantum * 2**i), knobs.num_levels - 1)

    def rank(request):
        return level(request), request.arrival_s

    if step.waiting:
        displace(step, knobs, min(step.waiting, key=rank), level)
    by_turns(step, knobs, rank, knobs.chunk_size, of_largest(level))


def slo_aware(step, knobs, line):
    now, ask = step.now, knobs.estimator

    def due(request):
        slo, first = request.slo, request.first_token_s
        if slo is None:
            return float("inf")
        if first is not None:
            return first + slo.tpot_s * request.num_output_tokens if slo.tpot_s is not None else float("inf")
        return request.arrival_s + min(float("inf") if s is None else s for s in (slo.ttft_s, slo.e2e_s))

    def latest_start(request):
        cached = step.cached_tokens(request)
        return due(request) - ask.step_s(request.num_tokens - cached, cached)

    def order(step):
        starts = {r: latest_start(r) for r in step.waiting}
        in_time = sorted((r for r in starts if starts[r] >= now), key=starts.get)
        late = sorted((r for r in starts if starts[r] < now), key=lambda r: r.arrival_s)
        return patient_first(step, [*in_time, *late], knobs.patience_s)

    mixed(step, knobs, order, bearable(step, knobs), line)


def bearable(step, knobs):
    """The largest step that meets every `tpot_s` of those that decode, tried one size after another."""
    limits = [r.slo.tpot_s for r in step.decoding if r.slo is not None and r.slo.tpot_s is not None]
    if not limits or not (step.waiting or step.prefilling):
        return knobs.chunk_size
    decodes, context = len(step.decoding), sum(r.num_tokens for r in step.decoding)
    start = next((r.num_computed_tokens for r in step.prefilling), 0)
    most = min(knobs.chunk_size, step.token_budget) - decodes
    fine = [n for n in range(1, most + 1) if knobs.estimator.step_s(n, start, decodes, context) <= min(limits)]
    return decodes + min(max([*fine, knobs.min_chunk]), most)


class StaticBatching:
    batch = ()

    def __call__(self, step, knobs, line):
        self.batch = [r for r in self.batch if r.state in ("waiting", "preempted", "swapped", "running")]
        if not self.batch:
            self.batch = list(with_reservations(step))[: min(knobs.batch_size, step.free_slots)]
        before = step.token_budget
        for request in self.batch:
            if not step.token_budget:
                break
            if request.state == "running" and request in step.prefilling:
                go_on(step, knobs, request, step.token_budget, newest)
            elif request.state != "running":
                step.grant(request)
        if step.token_budget == before:
            decode(step, knobs, newest)


def orca(step, knobs, line):
    budget = step.token_budget
    undisturbed = decode(step, knobs, newest)
    go_on_with_all(step, knobs, step.token_budget, newest)
    if not undisturbed:
        return
    for request in with_reservations(step):
        tokens, left = uncached(step, request), step.token_budget
        if not step.free_slots or not left or (tokens > left and tokens <= budget):
            break
        step.grant(request)


class Fair:
    """The accounts of the paper, from lists of who was admitted and who waits."""

    def __init__(self):
        self.admitted, self.waits, self.lifts, self.last = {}, [], {}, None

    def counter(self, knobs, client):
        requests = [(r, charged) for r, charged in self.admitted.items() if r.client == client]
        prompts = sum(charged for _, charged in requests)
        outputs = sum(r.num_output_tokens for r, _ in requests)
        return knobs.input_weight * prompts + knobs.output_weight * outputs + self.lifts.get(client, 0.0)

    def __call__(self, step, knobs, line):
        mixed(step, knobs, lambda step: self.order(step, knobs), knobs.chunk_size, line)

    def order(self, step, knobs):
        left = list(step.waiting)
        counters = {request.client: self.counter(knobs, request.client) for request in left}
        places = {client: i for i, client in enumerate(counters)}
        while left:
            client = min({r.client for r in left}, key=lambda c: (counters[c], places[c]))
            taken = next(r for r in left if r.client == client)
            left.remove(taken)
            charge = uncached(step, taken) if taken.num_preemptions == 0 else 0
            yield taken
            counters[client] += knobs.input_weight * charge

    def observe(self, event, knobs):
        if not isinstance(event, (Arrived, Preempted, Admitted, Aborted, Finished)):
            return
        request = event.request
        if isinstance(event, Arrived):
            self.lift(knobs, request.client)
        if isinstance(event, (Arrived, Preempted)):
            self.waits.append(request)
            return
        if request in self.waits:
            self.waits.remove(request)
            self.last = request.client
        if isinstance(event, Admitted) and request not in self.admitted:
            self.admitted[request] = request.num_prompt_tokens - event.cached_tokens

    def lift(self, knobs, client):
        waiting = {r.client for r in self.waits}
        if client in waiting:
            return
        others = waiting or ({self.last} if self.last is not None else set())
        least = min((self.counter(knobs, other) for other in others), default=0.0)
        own = self.counter(knobs, client)
        self.lifts[client] = self.lifts.get(client, 0.0) + max(least - own, 0.0)


REFERENCES = {
    "FCFS": lambda: fcfs, "ChunkedPrefill": lambda: chunked_prefill, "DecodePriority": DecodePriority,
    "PrefixReuse": lambda: prefix_reuse, "SJF": lambda: sjf, "HRRN": lambda: hrrn, "Priority": lambda: priority,
    "EDF": lambda: edf, "MultilevelFeedback": lambda: multilevel_feedback, "SLOAware": lambda: slo_aware,
    "StaticBatching": StaticBatching, "Orca": lambda: orca, "Fair": Fair,
}  # fmt: skip


class Reference(Policy):
    """Decides as the docstring of the class of `knobs` says; never holds."""

    def __init__(self, knobs):
        self.knobs, self.rule = knobs, REFERENCES[type(knobs).__name__]()
        self.needs_prediction = knobs.needs_prediction
        self.line = VICTIMS[knobs.victim] if hasattr(knobs, "victim") else None

    def schedule(self, step):
        self.rule(step, self.knobs, self.line)

    def observe(self, event):
        if isinstance(self.rule, Fair):
            self.rule.observe(event, self.knobs)
