"""`sarathi` decides as Vidur's scheduler did, and `fcfs` with V0's rules as Vidur's vLLM did; see golden.py.

Vidur's requests are stand-ins whose partly computed prompt keeps its length when it is preempted.
"""

import golden
import pytest
import works

from schedlab.policies.fcfs import FCFS
from schedlab.policies.sarathi import Sarathi

WATERMARK = {works.ROOMY: 0.01, works.TIGHT: 0.025}
"""Two blocks and one, however a share is rounded."""


def equal(referee, policy, seeds, **keys):
    """How many runs of `seeds` are equal, of how many."""
    _, runs = golden.load(referee)
    mine = {setting: text for setting, text in runs.items() if setting.seed in seeds}
    same = 0
    for setting, text in mine.items():
        asked, watermark = works.work(setting.kind, setting.seed), WATERMARK[setting.blocks]
        ours = works.on_ours(policy(), asked, blocks=setting.blocks, watermark=watermark, **keys)
        same += works.first_difference(ours, works.read(text)) is None
    return same, len(mine)


def sarathi():
    return Sarathi(chunk_size=works.BUDGET)


def v0():
    return FCFS(reserve_decode_block=True)


def test_sarathi_decides_as_vidurs():
    assert equal("vidur_sarathi", sarathi, range(2)) == (12, 12)


def test_fcfs_with_a_spare_block_a_decode_decides_as_vidurs_v0():
    assert equal("vidur_vllm", v0, range(1), max_num_batched_tokens=1 << 14) == (6, 6)


@pytest.mark.full
def test_every_run_of_sarathi():
    assert equal("vidur_sarathi", sarathi, range(works.SEEDS)) == (120, 120)


@pytest.mark.full
def test_every_run_of_v0():
    """Where they part, a step began with nobody running: then ours waives the watermark."""
    same, total = equal("vidur_vllm", v0, range(works.SEEDS), max_num_batched_tokens=1 << 14)
    assert (same, total) == (115, 120)
