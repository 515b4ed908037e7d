"""How much memory is left for the KV cache, and what becomes of a step's. Knows the operating system's accounts, not
what will be stored."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

KEPT_BYTES, FROM_HEAP_BYTES = 256 << 20, 32 << 20
"""How much freed memory a process keeps, and what is too large to be taken from it."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Let glibc's allocator, where it is that, keep what a step frees: the next would pay for each page anew."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, FROM_HEAP_BYTES)


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now: free device memory, or the smaller of free RAM and the control group's rest."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return min(_free_ram(), _cgroup_rest())


def kv_cache_bytes(device: torch.device, utilization: float, reserved: int) -> int:
    """Device memory for the KV cache: `utilization` of all of it, less what is taken and what a step will take."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free) - reserved


def readable(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _free_ram(meminfo: Path = Path("/proc/meminfo")) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_rest(root: Path = Path("/sys/fs/cgroup")) -> int:
    try:
        limit, used = ((root / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return 1 << 62  # no control group limits this process
    return 1 << 62 if limit == "max" else int(limit) - int(used)
