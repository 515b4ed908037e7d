"""Prompts are computed by one pool of replicas, answers by another; keys and values travel between them.

A request is served in two parts. The first computes the prompt and ends with its token, and its blocks stay where
they are. A replica of the other pool is chosen, takes blocks as soon as it has them, and the transfer begins; when it
is done the blocks of the first part are free, and the request waits at the other replica with its prompt computed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from schedlab.framework.cluster.loop import HANDOFF, LOADED, RECEIVE, RETRY, Cluster, Listener, PoolSetup
from schedlab.framework.cluster.replica import Replica
from schedlab.framework.cluster.transfer import Link, Links, Transfer
from schedlab.framework.errors import ConfigError
from schedlab.framework.limits import never_fits
from schedlab.framework.request import EngineRequest
from schedlab.framework.source import Source

FirstToken = Literal["prefill", "decode"]


@dataclass
class Handoff:
    """A request between its two parts: `prompt` ended at `source` at `ready_ns`, nanoseconds."""

    whole: EngineRequest
    prompt: EngineRequest
    source: Replica
    ready_ns: int
    transfer: Transfer | None = field(default=None)


class Disaggregated(Cluster):
    """A pool for prompts and one for what follows them.

    `first_token` says which of the pools answers first: the token that ends the prompt is shown as it is computed, or
    the decode replica computes the last token of the prompt again and shows the first one itself.
    """

    def __init__(
        self,
        prefill: PoolSetup,
        decode: PoolSetup,
        source: Source,
        listener: Listener,
        *,
        link: Link,
        first_token: FirstToken = "decode",
        seed: int = 0,
        look_ahead: bool = True,
    ) -> None:
        super().__init__(
            prefill.setups, prefill.router, source, listener, seed=seed, timing=prefill.timing, look_ahead=look_ahead,
            pool="prefill",
        )  # fmt: skip
        if not decode.setups:
            raise ConfigError("cluster.decode: expected at least one replica, found none")
        self._decode = self._add_pool(decode, "decode", seed, look_ahead)
        self._decoding = frozenset(self._decode.members)
        self._links = Links(link)
        self._first_token = first_token
        self._wholes: dict[EngineRequest, EngineRequest] = {}  # by their first parts
        self._handoffs: dict[EngineRequest, Handoff] = {}  # by the whole
        self._incoming: dict[Replica, deque[Handoff]] = {replica: deque() for replica in self._decode.members}
        self._token_bytes = token_bytes(self.replicas)

    # -- the first part --

    def _arrive(self, request: EngineRequest, now_ns: int) -> None:
        prompt = prompt_of(request)
        self._wholes[prompt] = request
        self._route(prompt, now_ns)

    def _end(self, request: EngineRequest, now_ns: int) -> None:
        """`request`, or the request that it is the first part of, is over."""
        whole = self._wholes.pop(request, None)
        if whole is not None:
            whole.continue_from(request, request.state, request.num_tokens, request.num_computed_tokens)
            whole.see_at_client(request.first_token_ns)
            whole.finished_ns = now_ns
        if (handoff := self._handoffs.pop(request, None)) is not None:
            self._release(handoff, now_ns)
        super()._end(whole or request, now_ns)

    def _note_end(self, replica: Replica, request: EngineRequest, now_ns: int) -> None:
        if replica in self._decoding:
            super()._note_end(replica, request, now_ns)
            if self._incoming[replica]:
                self._note(now_ns, RECEIVE, replica, request)
        else:
            self._in_flight.remove(request.request_id)
            self._listener.left(request)
            self._note(now_ns, HANDOFF, replica, request)

    def _note(self, now_ns: int, kind: int, replica: Replica, request: EngineRequest) -> None:
        """An event at a replica's step: as it ends, or, of what ended on arrival, as it begins."""
        if now_ns > self._begun_ns:
            self._push(now_ns, kind, replica.index, request)
        else:
            self._at_once.append((kind, request))
            replica.stop_at(now_ns)

    def _happened(self, kind: int, index: int, request: EngineRequest, now_ns: int) -> None:
        replica = self.replicas[index]
        if kind == HANDOFF:
            self._hand_over(request, replica, now_ns)
        elif kind == LOADED:
            self._load(self._handoffs.pop(request), replica, now_ns)
        elif kind == RECEIVE:
            self._receive(replica, request, now_ns)
        elif kind == RETRY and request in self._handoffs:
            self._route(request, now_ns, self._decode)
        else:
            super()._happened(kind, index, request, now_ns)

    # -- between the pools --

    def _hand_over(self, prompt: EngineRequest, replica: Replica, now_ns: int) -> None:
        """The first part ended: go on in the other pool, unless there is nothing left to do."""
        whole = self._wholes[prompt]
        if prompt.state != "finished":
            self._end(prompt, now_ns)
            return
        handoff = Handoff(whole, prompt, replica, now_ns)
        wanted = whole.recorded_output_tokens
        if (whole.max_tokens if wanted is None else wanted) == 1:
            self._release(handoff, now_ns)
            self._end(prompt, now_ns)
            return
        del self._wholes[prompt]
        told, n = int(self._first_token == "prefill"), whole.num_prompt_tokens
        whole.continue_from(prompt, "loading", n + told, n + told - 1)
        self._handoffs[whole] = handoff
        self._route(whole, now_ns, self._decode)

    def _send(self, request: EngineRequest, replica: Replica, now_ns: int) -> None:
        handoff = self._handoffs.get(request)
        if handoff is None:
            super()._send(request, replica, now_ns)
            return
        if (reason := never_fits(request, replica.engine.config)) is not None:
            self._turn_away(request, reason, now_ns)
            return
        self._enter(request)
        replica.expect(request)
        self._listener.routed(request, replica, now_ns)
        self._decode.sent(request, replica)
        self._incoming[replica].append(handoff)
        self._push(now_ns, RECEIVE, replica.index, request)

    def _receive(self, replica: Replica, cause: EngineRequest, now_ns: int) -> None:
        """Take room for what waits to come, in order, as far as there is any: between the replica's steps."""
        waiting = self._incoming[replica]
        if waiting and replica.engine.now_ns > now_ns:
            self._push(replica.engine.now_ns, RECEIVE, replica.index, cause)
            return
        while waiting:
            whole = waiting[0].whole
            if whole.abort_ns is not None and whole.abort_ns <= now_ns:
                waiting.popleft()
                self._withdraw(whole, replica, now_ns)
            elif replica.reserve(whole):
                self._transfer(waiting.popleft(), replica, now_ns)
            else:
                break
        self._look_at(replica)

    def _withdraw(self, whole: EngineRequest, replica: Replica, now_ns: int) -> None:
        whole.mirror("aborted", whole.num_tokens, whole.num_computed_tokens)
        whole.finished_ns = now_ns
        self._in_flight.remove(whole.request_id)
        replica.forget(whole, now_ns)
        self._end(whole, now_ns)

    def _transfer(self, handoff: Handoff, replica: Replica, now_ns: int) -> None:
        whole, source = handoff.whole, handoff.source
        tokens = whole.num_computed_tokens
        num_bytes = tokens * self._token_bytes
        begun, free, done = self._links.send(source.index, replica.index, num_bytes, now_ns)
        handoff.transfer = Transfer(
            whole.request_id, source.name, replica.name, tokens, num_bytes, handoff.ready_ns, now_ns, begun, free, done
        )
        self._push(done, LOADED, replica.index, whole)

    def _load(self, handoff: Handoff, replica: Replica, now_ns: int) -> None:
        """All has come."""
        assert handoff.transfer is not None
        self._listener.transferred(handoff.transfer)
        self._release(handoff, now_ns)
        replica.put(handoff.whole, now_ns)
        self._look_at(replica)

    def _release(self, handoff: Handoff, now_ns: int) -> None:
        handoff.source.engine.release(handoff.prompt, now_ns)
        self._look_at(handoff.source)


def prompt_of(request: EngineRequest) -> EngineRequest:
    """The part of `request` that a prefill replica serves: its prompt and one token."""
    part = EngineRequest(
        request.request_id, request.arrival_ns, request.num_prompt_tokens, request.content,
        recorded_output_tokens=None if (recorded := request.recorded_output_tokens) is None else min(recorded, 1),
        max_tokens=min(request.max_tokens, 1) if request.max_tokens >= 0 else 1,
        client=request.client, priority=request.priority, deadline_ns=request.deadline_ns, session=request.session,
        slo=request.slo, abort_ns=request.abort_ns, sampling=request.sampling, source_row=request.source_row,
        visible_ns=request.visible_ns, delivery_ns=request.delivery_ns,
    )  # fmt: skip
    part.place_in(request.own_program, request.depth)
    part.tried = request.tried
    part.hands_over = True
    return part


def token_bytes(replicas: list[Replica]) -> int:
    """Bytes of keys and values of a token, on all devices of a replica. ConfigError where replicas differ in it."""
    first = replicas[0]
    for replica in replicas:
        if _token_bytes(replica) != _token_bytes(first):
            raise ConfigError(
                f"cluster: {first.name} has {_token_bytes(first)} bytes of keys and values a token and {replica.name} "
                f"{_token_bytes(replica)}; expected one model in one precision"
            )
    return _token_bytes(first)


def _token_bytes(replica: Replica) -> int:
    """A block's bytes are of one device; each of the others has as many."""
    executor, size = replica.engine.executor, replica.engine.config.block_size
    devices = getattr(getattr(executor, "roofline", None), "tensor_parallel", 1)
    return executor.block_bytes(size) // size * devices
