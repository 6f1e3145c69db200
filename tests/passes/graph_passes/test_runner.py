from dataclasses import dataclass, field, replace

import pytest

from autoparallel.passes.graph_passes.runner import BrokenGraphError, run_passes
from autoparallel.planner.graph.graph import Graph, Node, Ref, TensorSpec

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


@dataclass(frozen=True)
class Given:
    """Gives back another graph."""

    name: str
    graph: Graph

    def __call__(self, graph: Graph) -> Graph:
        return self.graph


X_NODE, Y_NODE = GRAPH.nodes


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        (replace(GRAPH, nodes=(X_NODE, X_NODE, Y_NODE)), "appears twice"),
        (replace(GRAPH, nodes=(X_NODE, replace(Y_NODE, op=""))), "has no op"),
        (replace(GRAPH, loss=Ref("z")), "no node makes the loss"),
        (
            replace(GRAPH, nodes=(X_NODE, replace(Y_NODE, outputs=(TensorSpec((2,), "float32"),)))),
            "the loss is not a scalar",
        ),
        (replace(GRAPH, tied={"w": "z"}), "'w' is not tied to one node"),
        (replace(GRAPH, tied={"y": "x"}), "'y' is not tied to one node"),
    ],
)
def test_a_graph_that_keeps_no_rule_is_refused(graph, problem):
    with pytest.raises(BrokenGraphError, match=problem) as caught:
        run_passes(GRAPH, (Given("bad", graph),))
    assert "'bad'" in str(caught.value)
    assert run_passes(GRAPH, (Given("good", replace(GRAPH, tied={"w": "x"})),)).tied == {"w": "x"}
