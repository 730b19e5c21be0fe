"""Retries: what each try sees, which one is returned, and what is tried again. The configurations draw the rest."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Tensor, jit, ops
from mindspore import dtype as mstype
from support.retried_networks import LEARNING_RATE, HalvesItsInput, Penalised, Slope, inputs
from support.training import by_sgd

from ms_lossscale import DynamicLossScale


@pytest.mark.parametrize("mode", ["graph"], indirect=True)  # PyNative mode refuses to differentiate such a network.
def test_each_try_sees_the_inputs_of_the_call(mode):
    network = HalvesItsInput()
    cell = by_sgd(network, DynamicLossScale(2.0**15), 0.5, max_retries=4)
    _, overflow, loss_scale = cell(Tensor(np.full(3, 40.0, np.float32)))
    assert (bool(overflow.asnumpy()), float(loss_scale.asnumpy()), cell.counters()["retries"]) == (False, 2.0**11, 4)
    np.testing.assert_array_equal(network.weight.asnumpy(), np.full(3, 1.0 - 0.5 * 20.0, np.float32))


class Drawn(Slope):
    """Draws a factor in each run, which its loss, its gradient and its aux show."""

    def __init__(self):
        super().__init__()
        self.draw = ops.UniformReal()

    def construct(self, x, slope):
        factor = self.draw((3,)) + 1.0
        product = self.weight.astype(mstype.float16) * slope.astype(mstype.float16)
        return (product.astype(mstype.float32) * factor).sum(), factor


@quick_in_graph_mode
def test_the_loss_and_aux_are_those_of_the_attempt_that_is_applied(mode):
    network = Drawn()
    cell = by_sgd(network, DynamicLossScale(2.0**15), LEARNING_RATE, max_retries=8, has_aux=True)
    loss, _, _, (factor,) = cell(*inputs(4.0))
    assert cell.counters()["retries"] > 0
    moved = (1.0 - network.weight.asnumpy()) / LEARNING_RATE
    # float16 rounds the product of scale and factor by 2**-11; the weight's own rounding is divided by the step.
    np.testing.assert_allclose(moved, 4.0 * factor.asnumpy(), rtol=2.0**-10)
    np.testing.assert_allclose(loss.asnumpy(), 4.0 * factor.asnumpy().sum(), rtol=1e-6)


@pytest.fixture
def graphs(tmp_path):
    """The folder where MindSpore saves what it compiles."""
    mindspore.set_context(save_graphs=2, save_graphs_path=str(tmp_path / "graphs"))
    yield tmp_path / "graphs"
    mindspore.set_context(save_graphs=0)


def operators_made_by_python(graphs):
    return [path.name for path in graphs.glob("*_validate_*.ir") if "PyExecute" in path.read_text()]


def test_mindspore_has_python_make_a_dict_that_a_graph_returns(graphs):
    @jit
    def add_one(x):
        return {"x": x + 1.0}

    add_one(Tensor([1.0]))
    assert operators_made_by_python(graphs)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_no_attempt_waits_for_python(mode, graphs):
    cell = by_sgd(Slope(), DynamicLossScale(2.0**15), LEARNING_RATE, max_retries=8)
    cell(*inputs(4.0))
    assert cell.counters()["retries"] > 0
    assert list(graphs.glob("*_validate_*.ir")) and not operators_made_by_python(graphs)


@quick_in_pynative_mode
@pytest.mark.parametrize("shares", [True, False])
def test_a_loss_that_the_scale_makes_infinite_is_tried_again(mode, shares):
    scale = DynamicLossScale(2.0**15)
    cell = by_sgd(Penalised(scale if shares else 2.0**15), scale, LEARNING_RATE, max_retries=5)
    loss, overflow, used = cell(*inputs(1.0))
    if shares:
        assert np.isfinite(loss.asnumpy()) and not overflow.asnumpy()
        assert float(used.asnumpy()) == 2.0**11
        assert cell.counters() == {"applied_steps": 1, "skipped_steps": 0, "consecutive_skipped_steps": 0, "retries": 4}
    else:
        assert overflow.asnumpy() and not np.isfinite(loss.asnumpy())
        assert cell.counters()["retries"] == 0


@pytest.mark.parametrize("mode", ["graph"], indirect=True)  # PyNative mode may lose second derivatives.
def test_a_scale_that_an_input_gradient_works_on_backs_off_as_ever(mode):
    loss_scale = DynamicLossScale(2.0**14, backoff_if_loss_not_finite=False)
    its = by_sgd(Penalised(loss_scale), loss_scale, LEARNING_RATE)
    assert not np.isfinite(its(*inputs(1.0))[0].asnumpy())
    assert its.get_loss_scale() == 2.0**13
    # In MindSpore's cells the law does not know of losses.
    loss_scale.adjust(Tensor(False))
    assert loss_scale.get_loss_scale() == 2.0**12


@pytest.mark.slow
@quick_in_pynative_mode
def test_an_input_gradient_of_one_of_two_scales(mode):
    scales = [DynamicLossScale(2.0**15), DynamicLossScale(2.0**15)]
    networks, keywords = [Penalised(scales[0], "first"), Slope("second")], {"network_inputs": [(0, 1), (0, 2)]}
    cell = by_sgd(networks, scales, LEARNING_RATE, "simultaneous", max_retries=5, **keywords)
    _, overflow, used, _ = cell(*inputs(1.0, 1.0))
    assert not overflow.asnumpy()
    assert used.asnumpy().tolist() == [2.0**11, 2.0**15]
    # The loss of the network that holds none can't be mended.
    assert cell(*inputs(1.0, float("nan")))[1].asnumpy()
    assert cell.counters()["retries"] == 4
