"""Which lengths may be buckets, and what a bucket computes."""

from __future__ import annotations

import pytest
from test_verification import SEQ, captured, planned

from autoparallel.planner.dims.padding import find_padding
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan_file import loads
from autoparallel.runtime.data.variants import bucket_variants, variant_of


@pytest.mark.parametrize(
    ("lengths", "parallel", "code"),
    [
        ((8, 4), "pp=2,microbatches=4", "AP561"),
        ((4, 4), "pp=2,microbatches=4", "AP561"),
        ((0, 4), "pp=2,microbatches=4", "AP561"),
        ((4, SEQ), "pp=2,microbatches=4", "AP561"),
        ((4,), "pp=2,microbatches=4,schedule=terapipe,slices=2", "AP561"),
    ],
)
def test_lengths_that_cannot_be_are_refused(
    lengths: tuple[int, ...], parallel: str, code: str
) -> None:
    program = captured("gpt", "fp32")[1]
    with pytest.raises(AutoparallelError) as caught:
        bucket_variants(variant_of(program, loads(planned("gpt", parallel))), lengths)
    assert caught.value.code == code


def test_a_model_that_a_shorter_batch_would_train_another_way_is_refused() -> None:
    program = captured("bidirectional", "fp32")[1]
    whole = variant_of(program, loads(planned("bidirectional", "pp=2,microbatches=4")))
    with pytest.raises(AutoparallelError) as caught:
        bucket_variants(whole, (4,))
    assert caught.value.code == "AP560"


@pytest.mark.parametrize("model", ["window", "packed"])
def test_sequences_with_a_window_or_documents_are_padded_but_not_cut(model: str) -> None:
    program = captured(model, "fp32")[1]
    assert find_padding(program.graph)[0] == SEQ
    with pytest.raises(AutoparallelError) as caught:
        bucket_variants(variant_of(program, loads(planned(model, "dp=2"))), (4,))
    assert caught.value.code == "AP561"
    assert "window or packed documents" in caught.value.why


def test_a_bucket_has_the_planned_graph_at_its_length() -> None:
    program = captured("gpt", "fp32")[1]
    plan = loads(planned("gpt", "pp=2,microbatches=4"))
    whole = variant_of(program, plan)
    (bucket,) = bucket_variants(whole, (6,))
    ((short,), graph) = bucket.slices, whole.program.graph
    assert {node.name for node in graph} <= {node.name for node in short.graph}
    for node in graph:
        if node.kind == "op" and node.op.startswith("aten.linear"):
            wanted = tuple(6 if size == SEQ else size for size in node.spec.shape)
            assert short.graph[node.name].spec.shape == wanted
