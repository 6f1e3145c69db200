"""The band of a comparison equals that of the mask that it stands for, written out."""

import operator

import pytest
import torch
from capture_models import hf_batch, small_llama
from hypothesis import given
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.graph_passes import masks
from autoparallel.passes.graph_passes.mask_comparisons import (
    ALL,
    CAUSAL,
    COMPARISONS,
    comparison_band,
)
from autoparallel.passes.graph_passes.masks import SDPA, WINDOWED, _band
from autoparallel.passes.initialization.deferred_init import record_build
from autoparallel.planner.graph.graph import Node, Ref

POSITIONS = torch.arange(5)


def vectors(size: int) -> st.SearchStrategy[torch.Tensor]:
    """Positions, or positions that some numbers are added to, or any small numbers."""
    noise = st.lists(st.integers(-2, 2), min_size=size, max_size=size).map(torch.tensor)
    return st.one_of(
        st.just(torch.arange(size)),
        st.integers(-size, size).map(lambda shift: torch.arange(size) + shift),
        noise.map(lambda numbers: torch.arange(size) + numbers),
        noise,
    )


@given(st.data(), st.sampled_from(sorted(COMPARISONS)), st.integers(2, 5), st.booleans())
def test_a_comparison_says_what_its_mask_written_out_says(data, op, size, columns_first):
    rows, columns = data.draw(vectors(size))[:, None], data.draw(vectors(size))[None, :]
    pair = (columns, rows) if columns_first else (rows, columns)
    compare = COMPARISONS[op]
    found, written = comparison_band(compare, *pair), _band(compare(*pair))
    if found is None:  # it is known of all positions, or of counted ones
        assert written not in (ALL, CAUSAL)
        assert written is None or any((each.flatten().diff() != 1).any() for each in pair)
    else:
        assert found == written


def test_a_comparison_that_differs_between_sequences_is_no_band():
    rows = torch.stack([POSITIONS, POSITIONS + 1])[:, None, :, None]
    assert comparison_band(operator.ge, rows, POSITIONS[None, None, None]) is None


def attention_of(model) -> Node:
    program = capture(record_build(model).model, hf_batch())
    return next(node for node in program.graph if node.op in (SDPA, WINDOWED))


def test_a_mask_too_large_to_evaluate_becomes_the_causal_flag(monkeypatch):
    monkeypatch.setattr(masks, "LIMIT_ELEMENTS", 12 * 12 - 1)
    assert attention_of(small_llama).args[3:] == (None, 0.0, True)


@pytest.mark.parametrize("window", [4, 7])
def test_a_sliding_window_too_large_to_evaluate_stays_a_mask_unless_it_hides_half(
    monkeypatch, window
):
    def mistral():
        config = MistralConfig(
            num_hidden_layers=1,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            use_cache=False,
            sliding_window=window,
        )
        return MistralForCausalLM(config)

    monkeypatch.setattr(masks, "LIMIT_ELEMENTS", 12 * 12 - 1)
    node = attention_of(mistral)
    assert (node.op == WINDOWED, isinstance(node.args[3], Ref)) == (window == 4, window == 7)
    assert node.kwargs.get("window") == (4 if window == 4 else None)
