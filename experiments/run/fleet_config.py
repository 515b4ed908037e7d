"""What `cluster=` and `router=` name: the replicas of a fleet and their router, from a composed configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from schedlab.experiments.run import compose
from schedlab.experiments.run.checks import check_arguments
from schedlab.experiments.run.fleet import DecodePool, FleetPlan, Member
from schedlab.framework.cluster.disaggregated import FirstToken
from schedlab.framework.cluster.fleet import Timing
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.transfer import Link
from schedlab.framework.errors import ConfigError

TIMING = tuple(Timing.__dataclass_fields__)
"""Keys of `router` that are not its class's."""
LINK = tuple(Link.__dataclass_fields__)
ENTRY = ("count", "name", "hardware", "engine", "policy")
"""Keys of an entry of the list `cluster.replicas`, `cluster.prefill` or `cluster.decode`."""


class Replicas:
    """`cluster=replicas`: `replicas` is how many, each as the groups `engine`, `policy`, … say, or a list of entries,
    each of `count` replicas that differ in `hardware`, `policy` (names of options) or keys of `engine`."""

    def __init__(self, replicas: int | list[dict[str, Any]] = 4) -> None:
        self.entries = entries_of(replicas, "replicas")

    def plan(self, resolved: Mapping[str, Any]) -> FleetPlan:
        router, timing = router_of(resolved["router"])
        return FleetPlan(router, all_members(self.entries, resolved, "r"), timing)


class TwoPools:
    """`cluster=disaggregated`: `prefill` and `decode` are as `replicas` of `cluster=replicas`; `decode_router` names
    another router for the second pool."""

    def __init__(
        self,
        prefill: int | list[dict[str, Any]] = 2,
        decode: int | list[dict[str, Any]] = 2,
        decode_router: str | None = None,
        link: Mapping[str, float] | None = None,
        first_token: FirstToken = "decode",
    ) -> None:
        self.prefill, self.decode = entries_of(prefill, "prefill"), entries_of(decode, "decode")
        self.decode_router, self.first_token = decode_router, first_token
        self.link = link_of(link or {})

    def plan(self, resolved: Mapping[str, Any]) -> FleetPlan:
        router, timing = router_of(resolved["router"])
        told = resolved["router"] if self.decode_router is None else compose.preset("router", self.decode_router)
        other, its_timing = router_of(told)
        decode = DecodePool(other, all_members(self.decode, resolved, "d"), its_timing, self.link, self.first_token)
        return FleetPlan(router, all_members(self.prefill, resolved, "p"), timing, decode)


def link_of(keys: Mapping[str, float]) -> Link:
    for key in keys:
        if key not in LINK:
            raise ConfigError(compose.no_such(f"cluster.link.{key}: no such key", key, LINK, "a link"))
    check_arguments("cluster.link", keys, Link)
    return Link(**keys)


def entries_of(told: int | list[dict[str, Any]], pool: str) -> list[dict[str, Any]]:
    """Of `cluster.POOL`, a number or a list. ConfigError for what is no entry."""
    entries = [{"count": told}] if isinstance(told, int) else told
    for entry in entries:
        check_entry(entry, pool)
    return entries


def check_entry(entry: Any, pool: str) -> None:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"cluster.{pool}: expected a number or a list of mappings, found {entry!r}")
    for key in entry:
        if key not in ENTRY:
            raise ConfigError(compose.no_such(f"cluster.{pool}: {key}: no such key", key, ENTRY, "an entry"))
    count = entry.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"cluster.{pool}: count: expected 1 or more, found {count!r}")


def all_members(entries: Iterable[Mapping[str, Any]], resolved: Mapping[str, Any], name: str) -> list[Member]:
    return [member for entry in entries for member in members_of({"name": name, **entry}, resolved)]


def fleet_of(resolved: Mapping[str, Any]) -> FleetPlan | None:
    """The fleet that a resolved configuration names; None for `cluster=single`, an engine by itself."""
    cluster = compose.build_optional(resolved["cluster"], "cluster")
    if cluster is None:
        if resolved["router"]:
            raise ConfigError("router: a single engine has none; with cluster=replicas there is something to choose")
        return None
    if not resolved["router"]:
        raise ConfigError("router: a fleet needs one, as router=least_requests")
    plan: FleetPlan = cluster.plan(resolved)
    return plan


def router_of(node: Mapping[str, Any]) -> tuple[Router, Timing]:
    """The router of `conf/router` and how old what it reads is."""
    given = {key: node[key] for key in TIMING if key in node}
    check_arguments("router", given, Timing)
    router = compose.build({key: value for key, value in node.items() if key not in TIMING}, "router")
    return router, Timing(**given)


def members_of(entry: Mapping[str, Any], resolved: Mapping[str, Any]) -> Iterator[Member]:
    """The replicas of one entry."""
    config = entry_config(entry, resolved)
    member = Member(
        name=entry["name"],
        policy=compose.build(config["policy"], "policy"),
        engine=compose.build(config["engine"], "engine"),
        hardware=str(config["hardware"].get("name", "")),
        estimator=compose.build(config["estimator"], "estimator"),
        predictor=compose.build_optional(config["predictor"], "predictor"),
        admission=compose.build_optional(config["admission"], "admission"),
        config={**config, "cluster": {}, "router": {}},
    )
    return member.times(entry.get("count", 1), lambda: compose.build(config["engine"], "engine"))


def entry_config(entry: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of an entry's replicas: that of the run, with what the entry says instead."""
    config = dict(resolved)
    if "hardware" in entry:
        serving = compose.choices(("serving",)).get("serving", "none")
        machine = compose.preset("hardware", entry["hardware"], serving)
        for owner in ("engine", "estimator"):
            if "hardware" in config[owner]:
                config[owner] = {**config[owner], "hardware": machine}
        config["hardware"] = machine
    if "engine" in entry:
        config["engine"] = {**config["engine"], **keys_of(entry, "engine")}
    if "policy" in entry:
        config["policy"] = policy_of(entry["policy"], config)
    return config


def keys_of(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(entry[name], Mapping):
        raise ConfigError(f"cluster.replicas: {name}: expected keys and values, found {entry[name]!r}")
    keys: Mapping[str, Any] = entry[name]
    return keys


def policy_of(told: Any, config: Mapping[str, Any]) -> Any:
    """An option of the group by its name, with what it takes over from the run; or keys of the run's own policy."""
    if isinstance(told, Mapping):
        return {**config["policy"], **told}
    with compose.blaming("cluster.replicas: policy"):
        option = compose.with_option(OmegaConf.create(dict(config)), "policy", str(told))
        return compose.resolve(option)["policy"]
