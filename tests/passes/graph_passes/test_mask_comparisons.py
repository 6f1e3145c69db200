"""The meaning of a comparison equals that of the mask that it stands for, written out."""

import operator

import torch
from capture_models import hf_batch, small_llama
from hypothesis import given
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.graph_passes import masks
from autoparallel.passes.graph_passes.mask_comparisons import COMPARISONS, _comparison_meaning
from autoparallel.passes.graph_passes.masks import SDPA, _meaning
from autoparallel.passes.initialization.deferred_init import record_build
from autoparallel.planner.graph.graph import Ref

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
    written = compare(*pair)
    assert _comparison_meaning(compare, *pair) == _meaning(written)


def test_a_comparison_that_differs_between_sequences_has_no_meaning():
    rows = torch.stack([POSITIONS, POSITIONS + 1])[:, None, :, None]
    assert _comparison_meaning(operator.ge, rows, POSITIONS[None, None, None]) is None


def attention_arguments(model) -> tuple:
    program = capture(record_build(model).model, hf_batch())
    return next(node for node in program.graph if node.op == SDPA).args[3:]


def test_a_mask_too_large_to_evaluate_becomes_the_causal_flag(monkeypatch):
    monkeypatch.setattr(masks, "LIMIT_ELEMENTS", 12 * 12 - 1)
    assert attention_arguments(small_llama) == (None, 0.0, True)


def test_a_sliding_window_too_large_to_evaluate_stays_a_mask(monkeypatch):
    def mistral():
        config = MistralConfig(
            num_hidden_layers=1,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            use_cache=False,
            sliding_window=4,
        )
        return MistralForCausalLM(config)

    monkeypatch.setattr(masks, "LIMIT_ELEMENTS", 12 * 12 - 1)
    (mask, *_) = attention_arguments(mistral)
    assert isinstance(mask, Ref)
