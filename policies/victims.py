"""Who makes room: orders in which running requests are preempted while another cannot get its blocks.

A rule yields victims for one requester, first to go first, and never the requester itself or anybody that it may not
displace. Under every rule here the last in line is displaced by nobody and may displace everybody, so somebody always
comes to an end, however small the pool. Knows requests and what a policy ranks them by; preempts nobody itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile
from operator import itemgetter
from typing import Any

from schedlab.framework.request import Request
from schedlab.framework.step import Step

Rank = Callable[[Request], Any]
"""What a policy orders requests by: smaller runs first. Must not change while a request neither runs nor waits anew."""
Victims = Callable[[Step, Request], Iterable[Request]]


def running_now(step: Step) -> list[Request]:
    """Requests that ran at the start of the step and were not preempted since, in admission order."""
    return [request for request in step.running if request.state == "running"]


def newest(step: Step, request: Request) -> list[Request]:
    """Running requests that were admitted after `request`, newest first. vLLM's rule under `fcfs`."""
    running = running_now(step)
    return running[: running.index(request) : -1]


def worst_of(rank: Rank) -> Victims:
    """A rule: the largest `rank` goes first, the newest of equals; nobody is displaced by a larger one."""

    def victims(step: Step, request: Request) -> Iterable[Request]:
        in_line = sorted(running_now(step), key=rank)[::-1]
        return takewhile(lambda victim: victim is not request, in_line)

    return victims


def strictly_worse(step: Step, request: Request, rank: Rank) -> list[Request]:
    """Running requests of a strictly larger `rank` than the waiting `request`, worst first, the newest of equals.

    Equals are left alone: two requests of one rank would throw each other out for ever.
    """
    bar = rank(request)
    worse = [(found, r) for r in running_now(step) if (found := rank(r)) > bar]
    worse.sort(key=itemgetter(0))
    return [r for _, r in reversed(worse)]


def _displacing(step: Step, request: Request, line: list[Request]) -> Iterable[Request]:
    """`line` up to `request`, but never the oldest running request: it comes to its end whatever `line` says."""
    oldest = running_now(step)[0]
    return takewhile(lambda victim: victim is not request, [r for r in line if r is not oldest])


def least_computed(step: Step, request: Request) -> Iterable[Request]:
    """Who has computed least goes first, the newest of equals: the least is thrown away."""
    return _displacing(step, request, sorted(running_now(step), key=lambda r: -r.num_computed_tokens)[::-1])


def most_computed(step: Step, request: Request) -> Iterable[Request]:
    """Who has computed most goes first, the newest of equals: the fewest victims make room."""
    return _displacing(step, request, sorted(running_now(step), key=lambda r: r.num_computed_tokens)[::-1])


def oldest(step: Step, request: Request) -> Iterable[Request]:
    """The second oldest first: what round robin would do, and what costs those who have waited longest."""
    return _displacing(step, request, running_now(step))
