"""Attention against the reference."""

from shared_attention import *  # noqa: F403
