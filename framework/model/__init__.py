"""The real engine's model: shapes, weights, the decoder over a ragged batch, and the executor that runs it.

`config` needs no torch, so that the virtual clock can read shapes; the other modules import torch and kernels.
"""
