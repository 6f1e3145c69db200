import pytest

from autoparallel.cost_model.resolve import resolve_cluster
from autoparallel.planner.errors import UsageError
from autoparallel.planner.precision import check_precision


def test_a_gpu_without_units_for_bf16_is_refused_and_may_have_fp16():
    with pytest.raises(UsageError, match="V100-16GB does not compute in bf16") as caught:
        check_precision(resolve_cluster("2xV100-16GB"), "bf16")
    assert caught.value.code == "AP126"
    check_precision(resolve_cluster("2xV100-16GB"), "fp16")


@pytest.mark.parametrize("cluster", ["8xA100-80GB", "8xH100", "cpu:2"])
def test_devices_that_have_or_need_no_such_units_run_in_bf16(cluster):
    check_precision(resolve_cluster(cluster), "bf16")
