"""Two kinds of traffic on one engine: people who wait, and a pool of batch work that fills what they leave."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.workloads.arrivals import Arrivals
from schedlab.workloads.lengths import Lengths
from schedlab.workloads.populations import Client, Synthetic
from schedlab.workloads.sessions import ClosedLoop, ThinkTime
from schedlab.workloads.trace import Labels, Provenance, Trace, concatenate
from schedlab.workloads.workload import Offered

ONLINE, OFFLINE = "online", "offline"
"""Clients, and the SLO classes of their requests."""


@dataclass(kw_only=True)
class OnlineOffline(Offered):
    """For `duration_s`, requests of class `online` arrive by themselves, and `pool` requests of class `offline` are
    there at any time: where one ends, the next takes its place at once.

    arrivals, lengths, priority : of the online requests; offline ones have priority 0
    pool_lengths                : of the offline ones, of which there are `pool_requests` in all, dealt out evenly: as
                                  many as nobody serves in that time, or the pool runs dry
    slo_classes                 : `online` has limits, `offline` has none, so that it is in no pooled attainment
    """

    name: str = "online_offline"
    duration_s: float
    arrivals: Arrivals
    lengths: Lengths
    pool: int
    pool_lengths: Lengths
    pool_requests: int = 20_000
    priority: int = 1
    think: ThinkTime = field(default_factory=lambda: ThinkTime(0.0))

    def __post_init__(self) -> None:
        if not 1 <= self.pool <= self.pool_requests:
            raise ConfigError(f"workload.pool={self.pool}, expected 1 to pool_requests={self.pool_requests}")
        if missing := {ONLINE, OFFLINE} - set(self.slo_classes):
            raise ConfigError(f"workload.slo_classes: expected {ONLINE} and {OFFLINE}, {min(missing)} is not there")
        if self.stop_after_s is None:
            self.stop_after_s = self.duration_s

    def load(self, seed: int = 0) -> Trace:
        chat = Client(self.arrivals, self.lengths, priority=self.priority, slo=ONLINE)
        online = Synthetic(duration_s=self.duration_s, clients={ONLINE: chat}).load(seed)
        work = ClosedLoop(
            name=OFFLINE, users=self.pool, num_requests=self.pool_requests, lengths=self.pool_lengths, think=self.think
        ).load(seed)
        theirs = Labels(np.zeros(len(work), dtype=np.int64), (OFFLINE,))
        both = concatenate([online, work.with_columns(client=theirs, slo=theirs)])
        rows = np.arange(len(both))
        return (
            both.with_columns(name=self.name, source_row=rows)
            .sorted()
            .with_columns(source_row=rows, provenance=Provenance())
        )
