"""Batches cut by phase: every position goes to the kernel of its phase, and the results are those of any other cut."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged import Pages
from test_config import preset

from schedlab.framework.model.decoder import RaggedBatch
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.phases import batch_by_phase
from schedlab.framework.model.weights import random_weights

CPU = torch.device("cpu")
TINY = preset("tiny")
WEIGHTS = random_weights(TINY, 0, torch.float64)

GRANTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 12), st.integers(0, 25), st.integers(1, 30)), min_size=1, max_size=5
)


def inputs_of(pages, grants):
    """Inputs of (prompt, generated, computed before, granted) tokens; computed and granted are cut to what there is."""
    made = []
    for i, (prompt, generated, before, count) in enumerate(grants):
        tokens = np.random.default_rng(i).integers(3, 900, prompt + generated).tolist()
        sequence = pages.add(tokens[:prompt], f"r{i}")
        sequence.tokens = tokens
        before = min(before, len(tokens) - 1)
        if before:
            pages.step((sequence, before))
            sequence.tokens = tokens
        made.append((sequence, min(count, len(tokens) - sequence.computed)))
    return pages.inputs(made)


@given(GRANTS)
def test_each_row_is_in_the_span_of_its_phase_with_its_own_context(grants):
    inputs = inputs_of(Pages(ModelExecutor(TINY, weights=WEIGHTS, dtype="float64"), 80, 4), grants)
    batch = batch_by_phase(inputs, CPU)
    sequence_T = np.repeat(np.arange(len(inputs.requests)), np.diff(inputs.query_starts_N1))
    covered = []
    for span in batch.spans:
        starts = (span.query_starts_N1 + span.rows.start).tolist()
        assert starts[-1] == span.rows.stop and len(span.context_lens_N) == len(starts) - 1
        for i, (first, stop) in enumerate(zip(starts, starts[1:], strict=False)):
            positions = inputs.positions_T[first:stop]
            generated = positions >= inputs.requests[sequence_T[first]].num_prompt_tokens
            assert (generated == span.decode).all() and (stop == first + 1 or not span.decode)
            assert positions[-1] + 1 == span.context_lens_N[i]
            assert np.array_equal(span.block_tables_NB[i], inputs.block_tables_NB[sequence_T[first]])
        covered += range(span.rows.start, span.rows.stop)
    assert covered == list(range(len(inputs.token_ids_T)))
    assert all(a.decode != b.decode for a, b in zip(batch.spans, batch.spans[1:], strict=False))


@given(GRANTS)
def test_the_logits_are_those_of_the_other_cut(grants):
    executor = ModelExecutor(TINY, weights=WEIGHTS, dtype="float64")
    inputs = inputs_of(Pages(executor, 80, 4), grants)
    with torch.inference_mode():
        ours, theirs = (
            executor._decoder.forward(cut(inputs, CPU), executor.kv_caches) for cut in (batch_by_phase, RaggedBatch.of)
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
