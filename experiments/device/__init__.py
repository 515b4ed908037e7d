"""Kernels and engine on this machine's GPU: what is correct, and how fast; `device_check.py` is the command."""
