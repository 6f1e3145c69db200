import pytest

from autoparallel.cost_model.cluster.shorthand import resolve_cluster
from autoparallel.planner.costs.precision import EIGHT_BITS, check_precision, with_precision
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.graph import Graph, Node, Ref


def test_a_gpu_without_units_for_bf16_is_refused_and_may_have_fp16():
    with pytest.raises(UsageError, match="V100-16GB does not compute in bf16") as caught:
        check_precision(resolve_cluster("2xV100-16GB"), "bf16")
    assert caught.value.code == "AP126"
    check_precision(resolve_cluster("2xV100-16GB"), "fp16")


@pytest.mark.parametrize("cluster", ["8xA100-80GB", "8xH100", "cpu:2"])
def test_devices_that_have_or_need_no_such_units_run_in_bf16(cluster):
    check_precision(resolve_cluster(cluster), "bf16")


@pytest.mark.parametrize("cluster", ["8xA100-80GB", "cpu:2"])
def test_fp8_needs_units_for_it(cluster):
    with pytest.raises(UsageError, match="does not compute in fp8") as caught:
        check_precision(resolve_cluster(cluster), "fp8")
    assert caught.value.code == "AP126"
    check_precision(resolve_cluster("8xH100"), "fp8")


def test_all_linear_layers_but_the_head_cast_their_factors():
    linear = "aten.linear.default"
    nodes = [Node(name, "op", linear) for name in ("up", "down", "head")]
    graph = Graph((*nodes, Node("sum", "op", "aten.sum.default")), Ref("sum"), 1)
    found = {node.name: node.product_dtype for node in with_precision(graph, "fp8").nodes}
    assert found == {"up": EIGHT_BITS, "down": EIGHT_BITS, "head": "", "sum": ""}
