"""Deliberate faults of the engine's memory must change the tokens: the stub sees what a real KV cache would suffer.

The books are not audited here; only the generated tokens speak.
"""

import random

import numpy as np
import pytest
from four import ALL
from scripted import interpreted_only

from schedlab.framework.columns import Columns
from schedlab.framework.eviction import CachedSpan
from schedlab.framework.ledger import Ledger
from schedlab.framework.prefix_cache import PrefixCache
from schedlab.framework.testing.chaos import Chaos
from schedlab.framework.testing.harness import Spec, check_streams, run


def traces(count=8):
    """Traces in which prefixes are shared, blocks run short and the host pool is used."""
    for seed in range(count):
        draw = random.Random(seed)
        trace = []
        for i in range(18):
            shared, own = draw.randint(0, 5), draw.randint(0, 3)
            ids = tuple(range(shared)) + tuple(100 * (i % 4 + 1) + j for j in range(own + 1))
            prompt = 4 * len(ids) - draw.randint(0, 3)
            trace.append(
                Spec(f"r{i}", draw.randint(0, 40) * 1_000_000, prompt, draw.randint(4, 30), ids=ids, id_width=4)
            )
        yield trace


def tokens_stay_right(count=8):
    policies = [*ALL.values(), lambda: Chaos(1), lambda: Chaos(2)]
    for trace in traces(count):
        for make in policies:
            outcome = run(make(), trace, audited=False, num_blocks=17, max_num_batched_tokens=24, swap_space_gib=2**-20)
            check_streams(outcome)


def swap_last_blocks(patch):
    refresh = Columns.refresh

    def wrong(self, request):
        refresh(self, request)
        row, n = self.block_tables[request.slot], len(request.block_table)
        if n > 1:
            row[n - 2], row[n - 1] = row[n - 1], row[n - 2]

    patch.setattr(Columns, "refresh", wrong)


def forget_a_new_block(patch):
    moved_on = Columns._moved_on

    def forgetful(self, decode_set):
        rows = moved_on(self, decode_set)
        rows.slots_N = np.where(rows.starts_N % self.block_size == 0, 0, rows.slots_N)
        return rows

    patch.setattr(Columns, "_moved_on", forgetful)


def publish_before_computing(patch):
    admit = Ledger.admit

    def hasty(self, request, quote, tokens):
        admit(self, request, quote, tokens)
        self.cache.publish(request, min(len(request.block_table), request.num_prompt_tokens // self.block_size))

    patch.setattr(Ledger, "admit", hasty)


def publish_a_block_too_many(patch):
    publish = PrefixCache.publish

    def generous(self, request, whole):
        publish(self, request, min(whole + 1, len(request.block_table)))

    patch.setattr(PrefixCache, "publish", generous)


def swap_in_reversed(patch):
    admit = Ledger.admit

    def wrong(self, request, quote, tokens):
        before = len(self.copies_in)
        admit(self, request, quote, tokens)
        hosts = [host for host, _ in self.copies_in[before:]]
        self.copies_in[before:] = [(h, b) for h, (_, b) in zip(reversed(hosts), self.copies_in[before:], strict=True)]

    patch.setattr(Ledger, "admit", wrong)


def swap_out_too_little(patch):
    save = Ledger._save

    def wrong(self, request, mode):
        before = len(self.copies_out)
        done = save(self, request, mode)
        del self.copies_out[before : before + 1]
        return done

    patch.setattr(Ledger, "_save", wrong)


def free_host_blocks_at_once(patch):
    admit = Ledger.admit

    def early(self, request, quote, tokens):
        admit(self, request, quote, tokens)
        self.host.give_back(request.host_blocks)
        request.host_blocks = []

    patch.setattr(Ledger, "admit", early)


def keep_evicted_in_the_index(patch):
    evict = PrefixCache._evict

    def leaky(self, count):
        gone = [(run.key, list(run.blocks)) for run, _ in self._victims(count)]
        evict(self, count)
        for key, blocks in gone:
            if key is not None and key not in self.index:
                ghost = self.index[key] = CachedSpan(key, blocks)
                ghost.owner_lengths.append(len(blocks))
                ghost.num_unowned = 0

    patch.setattr(PrefixCache, "_evict", leaky)


def free_what_another_owns(patch):
    release = PrefixCache.release

    def wrong(self, request):
        runs = list(self._spans(request.chain, 0, request.num_published))
        shared = [block for run, count in runs if len(run.owner_lengths) > 1 for block in run.blocks[:count]]
        release(self, request)
        self.pool.give_back(shared)

    patch.setattr(PrefixCache, "release", wrong)


def do_not_repoint_duplicates(patch):
    def wrong(self, run, table, start, have, want):
        live = min(len(run.blocks), want)
        if live > have:
            self.pool.give_back(table[start + have : start + live])

    patch.setattr(PrefixCache, "_drop_duplicates", wrong)


def trust_a_hit_too_far(patch):
    quote = Ledger.quote

    def generous(self, request):
        found = quote(self, request)
        if found.hit:
            found.start = min(found.start + 1, request.num_tokens - 1)
        return found

    patch.setattr(Ledger, "quote", generous)


def forget_generated_tokens(patch):
    enter = Columns.enter

    def forgetful(self, request, prompt_T):
        enter(self, request, prompt_T)
        self.tokens[request.slot, len(prompt_T) : request.num_tokens] = 0

    patch.setattr(Columns, "enter", forgetful)


MUTANTS = [
    swap_last_blocks, forget_a_new_block, publish_before_computing, publish_a_block_too_many, swap_in_reversed,
    swap_out_too_little, free_host_blocks_at_once, keep_evicted_in_the_index, free_what_another_owns,
    do_not_repoint_duplicates, trust_a_hit_too_far, forget_generated_tokens,
]  # fmt: skip


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.full)])
def test_the_honest_engine_passes(count):
    tokens_stay_right(count)


@interpreted_only
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_faulty_memory_changes_the_tokens(mutant, monkeypatch):
    mutant(monkeypatch)
    told = "given back twice" if mutant is free_what_another_owns else "generated other tokens"
    with pytest.raises(AssertionError, match=told):
        tokens_stay_right()
