"""Hydra scans every module of `hydra_plugins` at each start: keep this one light."""
