"""What lies between layers, cut into the branches that it belongs to."""

from __future__ import annotations

import pytest

from autoparallel.passes.initialization.deferred_init import record_build
from autoparallel.passes.programs.program import Program
from autoparallel.planner.stage.branches import Section, find_sections
from autoparallel.planner.stage.structure import Structure
from autoparallel.planning.capture import capture_model
from autoparallel.target.load import load_target


def captured(model: str, rows: int, seq: int | None) -> Program:
    found = load_target(model, {})
    deferred = record_build(found.build_model, seed=0)
    batch = found.example_batch(rows, seq)
    return capture_model(deferred.model, batch, found.loss_fn, "fp32")


def test_the_end_of_a_tower_and_the_beginning_of_the_next_are_blocks_apart() -> None:
    program = captured("examples/two_towers.py", 4, None)
    owner = {
        name: position
        for position, block in enumerate(program.blocks.blocks)
        for name in block.parameters
    }
    found = find_sections(Structure(program.graph, program.blocks))
    assert len(found) == 1
    (start, middle), (also_middle, stop) = found[0].branches
    assert middle == also_middle
    of_tower = {"image": range(start, middle), "text": range(middle, stop)}
    for name, position in owner.items():
        tower = name.split("_")[0]
        if name.startswith(("image_", "text_")):
            assert position in of_tower[tower], name
    assert owner["patches.weight"] in of_tower["image"]
    assert owner["tokens.weight"] in of_tower["text"]
    assert owner["log_scale"] >= stop


def test_arms_of_a_wide_module_are_branches() -> None:
    program = captured("tests/models/three_arms.py", 4, None)
    assert find_sections(Structure(program.graph, program.blocks)) == (Section((1, 2, 3, 4)),)


@pytest.mark.parametrize("model", ["examples/gpt.py", "hf:tests/models/llama"])
def test_a_model_of_one_branch_is_cut_as_ever(model: str) -> None:
    program = captured(model, 2, 8)
    names = [block.name for block in program.blocks.blocks]
    assert names[0] == "embedding"
    assert names[-1] == "head"
    assert all("layers" in name for name in names[1:-1])
    assert find_sections(Structure(program.graph, program.blocks)) == ()
