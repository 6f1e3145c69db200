"""Names of a file and of a model meet however either is wrapped."""

from __future__ import annotations

import pytest

from autoparallel.runtime.parameters.pretrained import match_names

NAMES = ("model.embed.weight", "model.layers.0.q.weight", "model.layers.0.q.bias", "head.weight")


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "base_model.model.", "module._orig_mod."]
)
def test_a_prefix_before_all_names_of_the_file_is_removed(prefix: str) -> None:
    found = match_names(NAMES, [prefix + name for name in NAMES])
    assert found.sources == {name: prefix + name for name in NAMES}
    assert found.missing == found.unexpected == ()


def test_a_prefix_that_the_file_lacks_is_added() -> None:
    stored = [name.removeprefix("model.") for name in NAMES]
    found = match_names(NAMES, stored)
    assert found.sources == dict(zip(NAMES, stored, strict=True))
    assert found.unexpected == ()


def test_a_prefix_of_the_body_alone_leaves_other_names_as_they_are() -> None:
    body = ["h.0.weight", "h.1.weight", "h.0.bias"]
    found = match_names(body, [f"transformer.{name}" for name in body] + ["lm_head.weight"])
    assert found.sources == {name: f"transformer.{name}" for name in body}
    assert found.unexpected == ("lm_head.weight",)


def test_what_wrappers_put_inside_of_names_does_not_count() -> None:
    found = match_names(
        ["layers.0.q.weight"], ["layers._orig_mod.0._fsdp_wrapped_module.q.base_layer.weight"]
    )
    assert found.missing == found.unexpected == ()


def test_either_name_of_a_tied_tensor_serves_both() -> None:
    tied = {"head.weight": "model.embed.weight"}
    for stored in ("model.embed.weight", "head.weight"):
        names = [stored, "model.layers.0.q.weight", "model.layers.0.q.bias"]
        found = match_names(NAMES, names, tied=tied)
        assert found.sources["model.embed.weight"] == stored
        assert found.sources["head.weight"] == stored
        assert found.missing == found.unexpected == ()
    nothing = match_names(NAMES, ["model.layers.0.q.weight", "model.layers.0.q.bias"], tied=tied)
    assert nothing.missing == ("model.embed.weight",)


def test_names_of_one_side_alone_are_told() -> None:
    found = match_names(
        NAMES,
        [*NAMES[:3], "rope.freqs", "old.mask", "extra.weight"],
        optional=("rope.freqs",),
        ignored=(r"\.mask$",),
    )
    assert found.missing == ("head.weight",)
    assert found.unexpected == ("extra.weight",)
