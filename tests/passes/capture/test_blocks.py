from itertools import pairwise

import pytest
import torch
from capture_models import gpt_batch, hf_batch, small_gpt, small_gpt2, small_llama
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.initialization.deferred_init import record_build
from autoparallel.passes.programs.program import Program


def captured(build, batch) -> Program:
    return capture(record_build(build).model, batch)


def kinds(program: Program) -> list[str]:
    return [block.kind for block in program.blocks.blocks]


MODELS = {
    "gpt": (small_gpt, gpt_batch(), ["embedding", "layers", "layers", "layers", "head"]),
    "llama": (small_llama, hf_batch(), ["embedding", "layers", "layers", "head"]),
    "gpt2": (small_gpt2, hf_batch(), ["embedding", "h", "h", "head"]),
    "tied": (
        lambda: small_gpt(tied=True),
        gpt_batch(),
        ["embedding", "layers", "layers", "layers", "head"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_found_and_every_rule_of_blocks_holds(name):
    build, batch, expected = MODELS[name]
    program = captured(build, batch)
    assert kinds(program) == expected
    assert_blocks_are_sound(program)


def assert_blocks_are_sound(program: Program) -> None:
    graph, blocks = program.graph, program.blocks
    listed = [name for block in blocks.blocks for name in block.nodes]
    assert sorted(listed) == sorted(n.name for n in graph if n.kind == "op")
    owned = [name for block in blocks.blocks for name in block.parameters]
    assert len(owned) == len(set(owned))
    assert {n.name for n in graph.parameters} <= set(owned)
    for name, position in blocks.of_node.items():
        for ref in graph[name].inputs:
            assert blocks.of_node.get(ref.name, -1) <= position
    template = blocks.template
    for block in blocks.blocks:
        first = blocks.kinds[block.kind]
        for mine, its in zip(block.nodes, first.nodes, strict=True):
            assert graph[mine].op == graph[its].op
            assert graph[mine].outputs == graph[its].outputs
            for a, b in zip(graph[mine].inputs, graph[its].inputs, strict=True):
                if a.name in block.nodes + block.parameters:
                    assert template[a.name] == template.get(b.name)
        for mine, its in zip(block.parameters, first.parameters, strict=True):
            assert graph[mine].outputs == graph[its].outputs
            assert mine.replace(block.name, "") == its.replace(first.name, "")


def test_a_tied_weight_belongs_to_the_first_block_that_uses_it():
    program = captured(lambda: small_gpt(tied=True), gpt_batch())
    assert "tokens.weight" in program.blocks.blocks[0].parameters
    assert "tokens.weight" not in program.blocks.blocks[-1].parameters


class Mixed(nn.Module):
    """Wide and narrow layers in turn, with an op between layers that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in (8, 16, 8, 16)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.mean()


def test_layers_of_different_structure_get_numbered_kinds_and_ops_between_join_them():
    program = captured(Mixed, (torch.randn(2, 8),))
    assert [block.name for block in program.blocks.blocks] == [
        "stem",
        "layers.0",
        "layers.1",
        "layers.2",
        "layers.3",
        "head",
    ]
    assert kinds(program) == ["stem", "layers", "layers.1", "layers", "layers.1", "head"]
    assert_blocks_are_sound(program)


class Towers(nn.Module):
    """Two stacks of layers, an op with parameters between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"layers": self.stack()})
        self.bridge = nn.Linear(8, 8)
        self.decoder = nn.ModuleDict({"layers": self.stack()})

    @staticmethod
    def stack() -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder["layers"]:
            x = layer(x)
        x = self.bridge(x)
        for layer in self.decoder["layers"]:
            x = layer(x)
        return x.sum()


def test_two_stacks_have_kinds_by_their_whole_paths_and_the_bridge_is_a_block():
    program = captured(Towers, (torch.randn(2, 8),))
    assert kinds(program) == [
        "encoder.layers",
        "encoder.layers.1",
        "bridge",
        "decoder.layers",
        "decoder.layers",
        "head",
    ]
    assert_blocks_are_sound(program)


class Straight(nn.Module):
    """Eight different linears, no list: widths are narrow after every second one."""

    def __init__(self) -> None:
        super().__init__()
        widths = [32, 64, 4, 64, 5, 64, 6, 64, 7]
        for i, (a, b) in enumerate(pairwise(widths)):
            self.add_module(f"part_{i}_of_it", nn.Linear(a, b))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x).tanh()
        return x.sum()


def test_a_graph_without_layers_is_cut_where_it_is_narrow():
    program = captured(Straight, (torch.randn(2, 32),))
    assert_blocks_are_sound(program)
    graph, blocks = program.graph, program.blocks.blocks
    assert len(blocks) == 4
    for block in blocks[:-1]:
        assert graph[block.nodes[-1]].spec.shape[1] < 8


def test_a_small_graph_without_layers_is_one_block():
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 32)
            self.down = nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu()).sum()

    program = captured(Mlp, (torch.randn(2, 8),))
    assert kinds(program) == ["model"]


class Interrupted(nn.Module):
    """The first layer is used again after the last: its nodes cannot be one block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 1, 2, 0):
            x = self.layers[i](x)
        return x.sum()


def test_a_layer_used_again_later_keeps_every_edge_forward():
    assert_blocks_are_sound(captured(Interrupted, (torch.randn(2, 8),)))


class Stages(nn.Module):
    """A stage of two equal layers, then one of two that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
                nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.sum()


def test_a_stage_without_equal_layers_is_not_left_to_the_head():
    program = captured(Stages, (torch.randn(2, 8),))
    assert [block.name for block in program.blocks.blocks] == [
        "stages.0.0",
        "stages.0.1",
        "stages.1.0",
        "stages.1.1",
        "head",
    ]
    assert_blocks_are_sound(program)


class Padded(nn.Module):
    """Each of its blocks returns a part of what it computes, which the next one keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 8)
        layers = (nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 8)]) for _ in range(3))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, layer in self.layers:
            x = layer(nn.functional.pad(norm(x), (0, 0, 1, 2)))[:, 1:5]
        return x.square().mean()


def test_blocks_that_keep_different_memory_are_of_different_kinds():
    """The first block keeps the stem's result, the others that of the layer before, with more."""
    program = captured(Padded, (torch.randn(4, 4, 5),))
    assert kinds(program)[:4] == ["stem", "layers", "layers.1", "layers.1"]
