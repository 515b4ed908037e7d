"""Configs of patience."""
