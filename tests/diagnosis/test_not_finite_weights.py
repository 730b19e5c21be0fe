"""Every diagnosis names the weights that are not finite themselves."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, advise_float32, locate_overflow, profile_gradients
from ms_lossscale._values import named_counts, not_finite_weights

NAN, INF = float("nan"), float("inf")


def parameter(name, values, dtype=mstype.float32, requires_grad=True):
    return Parameter(Tensor(values, dtype), name=name, requires_grad=requires_grad)


@pytest.mark.parametrize("dtype", [mstype.float16, mstype.float32, mstype.bfloat16, mstype.float64])
def test_values_are_counted_by_weight(dtype):
    weights = [
        parameter("one", [1.0, NAN, 2.0], dtype),
        parameter("good", [1.0, 2.0], dtype),
        parameter("three", [[INF, -INF], [NAN, 0.0]], dtype),
        parameter("integers", [1, 2], mstype.int32),
    ]
    assert not_finite_weights(weights) == {"one": 1, "three": 3}
    assert named_counts(not_finite_weights(weights)) == "one (1 value), three (3 values)"


def test_a_mask_is_no_weight():
    mask = np.float32([[0, -INF], [0, 0]])
    assert not_finite_weights([parameter("mask", mask, requires_grad=False)]) == {}
    assert not_finite_weights([parameter("weight", mask)]) == {"weight": 1}
    frozen = parameter("frozen", [-INF, INF, NAN, 1.0], requires_grad=False)
    assert not_finite_weights([frozen]) == {"frozen": 2}


def network_and_batch(frozen=False):
    """Two layers, in float16; of the first layer's weight two values are NaN."""
    net = nn.SequentialCell(nn.Dense(2, 3), nn.Dense(3, 1)).to_float(mstype.float16)
    weight = net[0].weight
    weight.requires_grad = not frozen
    ops.assign(weight, Tensor([[1, NAN], [NAN, 1], [1, 1]], mstype.float32))
    network = nn.WithLossCell(net, nn.MSELoss())
    return network, (Tensor(np.ones((4, 2), np.float32)), Tensor(np.zeros((4, 1), np.float32)))


REMARK = "Weights themselves are infinite or NaN: 0.weight (2 values). No loss scale and no cell in float32 mends that."


def cell_of(network):
    return ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1), DynamicLossScale()).set_train()


@quick_in_graph_mode
@pytest.mark.parametrize("frozen", [False, *slow(True)])
def test_the_diagnoses_name_them(mode, frozen):
    network, inputs = network_and_batch(frozen)

    trace = locate_overflow(network, inputs, loss_scale=1.0)
    assert (trace.cell, trace.kind) == ("_backbone.0", "NaN")
    assert trace.note.startswith(REMARK)

    advice = advise_float32(network, batches=[inputs])
    assert not advice.holds
    assert advice.not_finite_weights == {"0.weight": 2}
    assert str(advice).count(REMARK) == 1
    assert "Look at what goes in there" not in str(advice)

    report = profile_gradients(network, batches=[inputs], loss_scale=1.0)
    assert report.not_finite_weights == {"0.weight": 2}
    with pytest.raises(
        ValueError, match=r"No loss scale can be recommended: Weights themselves are .* 0.weight .2 val"
    ):
        report.recommend()

    with pytest.raises(RuntimeError) as caught:
        cell_of(network).find_loss_scale(*inputs)
    assert f"at every power of two from 1 to 2**24. {REMARK}" in str(caught.value)


class HidesNan(nn.Cell):
    """Like a ReLU on CPU, it makes NaN zero."""

    def construct(self, x):
        return ops.select(x == x, x, ops.zeros_like(x))


@quick_in_graph_mode
def test_they_name_them_also_where_no_loss_shows_it(mode):
    network, inputs = network_and_batch()
    net = network.backbone_network
    hidden = nn.WithLossCell(nn.SequentialCell(net[0], HidesNan(), net[1]).to_float(mstype.float16), nn.MSELoss())
    cell = cell_of(hidden)
    with pytest.warns(RuntimeWarning, match=r"'find_loss_scale\(\)': Weights themselves are infinite or NaN: 0.weight"):
        cell.find_loss_scale(*inputs)
    assert str(locate_overflow(cell, inputs, loss_scale=1.0)).endswith("float16).")
    assert REMARK in str(advise_float32(cell, [inputs]))
    assert REMARK in str(profile_gradients(cell, [inputs]))
