from dataclasses import dataclass, field, replace

import pytest

from autoparallel.passes.graph_passes.runner import BrokenGraphError, run_passes
from autoparallel.planner.graph import Graph, Node, Ref, TensorSpec

X = Ref("x")
SCALAR = (TensorSpec((), "float32"),)
GRAPH = Graph(
    (
        Node("x", "input", outputs=SCALAR),
        Node("y", "op", "aten.neg.default", (Ref("x"),), outputs=SCALAR),
    ),
    loss=Ref("y"),
    batch_size=1,
)


@dataclass(frozen=True)
class Rename:
    """Gives node ``y`` other arguments or another kind."""

    name: str
    ref: Ref = X
    kind: str = "op"

    def __call__(self, graph: Graph) -> Graph:
        x, y = graph.nodes
        return replace(graph, nodes=(x, replace(y, args=(self.ref,), kind=self.kind)))


@dataclass(frozen=True)
class Recorded(Rename):
    """The same, and notes that it has run."""

    seen: list[str] = field(default_factory=list)

    def __call__(self, graph: Graph) -> Graph:
        self.seen.append(self.name)
        return super().__call__(graph)


def test_passes_run_in_order():
    seen: list[str] = []
    graph = run_passes(GRAPH, (Recorded("first", seen=seen), Recorded("second", seen=seen)))
    assert seen == ["first", "second"]
    assert graph == GRAPH


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (Rename("bad", ref=Ref("z")), "no earlier node makes"),
        (Rename("bad", ref=Ref("x", 1)), "no earlier node makes"),
        (Rename("bad", ref=Ref("y")), "no earlier node makes"),
        (Rename("bad", kind="constant"), "depends on the input"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(broken, problem):
    with pytest.raises(BrokenGraphError, match=problem) as caught:
        run_passes(GRAPH, (Rename("good"), broken))
    assert "'bad'" in str(caught.value)
