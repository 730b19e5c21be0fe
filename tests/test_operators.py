"""What a step costs, counted: operators of the compiled graph, and reads by the host."""

import mindspore
import numpy as np
import pytest
from compiled_operators import operators
from gan_networks import NETWORK_INPUTS, GanLosses, gan_batch, generator_and_discriminator, two_losses, two_optimizers
from mindspore import Tensor, nn, ops
from networks import weight

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, SimultaneousTrainOneStepCell

SMALL, LARGE = 8, 160  # 160 x 160 is more elements than a small tensor has.


class Chain(nn.Cell):
    """Square matrices one after the other."""

    def __init__(self, size, count):
        super().__init__()
        self.size = size
        self.matrices = mindspore.ParameterTuple([weight(size, size, seed=i, name=f"matrix{i}") for i in range(count)])

    def construct(self, x):
        for matrix in self.matrices:
            x = ops.matmul(x, matrix)
        return x.sum()


@pytest.fixture(autouse=True)
def _graph_mode():
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    yield
    mindspore.set_context(mode=before)


def added(size, count, **keywords):
    """The operators that the cell has besides those of the stock cell, for a chain of so many matrices."""
    x = Tensor(np.ones((2, size), np.float32))
    counts = []
    for make_cell in (
        lambda network, optimizer: ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(), **keywords),
        nn.TrainOneStepCell,
    ):
        network = Chain(size, count)
        optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
        counts.append(operators(make_cell(network, optimizer).set_train(), x))
    counts[0].subtract(counts[1])
    return counts[0]


def difference(more, less):
    return {name: more[name] - less[name] for name in {*more, *less} if more[name] != less[name]}


def test_a_large_gradient_is_read_once_for_the_check_and_multiplied_once():
    # IsFinite and ReduceAll are those of a skipped step: where it overflowed, and whether it did after all.
    assert difference(added(LARGE, 5), added(LARGE, 4)) == {"Mul": 1, "ReduceSum": 2, "IsFinite": 2, "ReduceAll": 2}


def test_with_clip_norm_the_norm_is_the_check():
    grows = difference(added(LARGE, 5, clip_norm=1.0), added(LARGE, 4, clip_norm=1.0))
    # Half of the squares and sums, and all multiplications but one, are for norms that leave float32's range.
    assert grows == {"Square": 2, "ReduceSum": 4, "Mul": 4, "IsFinite": 1, "ReduceAll": 1}


def test_small_gradients_of_one_shape_cost_the_same_however_many_they_are():
    assert difference(added(SMALL, 12), added(SMALL, 6)) == {}


def test_the_forward_of_a_gan_runs_once_and_each_loss_goes_back_to_its_own_weights_only():
    inputs = gan_batch(seed=0)
    networks = generator_and_discriminator()
    cell = SimultaneousTrainOneStepCell(GanLosses(*networks), two_optimizers(*networks), DynamicLossScale())
    # Forward: the generator's one, and the discriminator's two for real and for fake samples. Backward: for each run of
    # the discriminator its two weights and what is between them; then what is between them, the samples, and the
    # generator's weight.
    assert operators(cell.set_train(), *inputs)["MatMul"] == (1 + 2 + 2) + (3 + 3) + 3

    networks = generator_and_discriminator()
    cell = SimultaneousTrainOneStepCell(
        two_losses(*networks), two_optimizers(*networks), DynamicLossScale(), network_inputs=NETWORK_INPUTS
    )
    # Once more runs all that comes after the generator's BatchNorm: its statistics move in each forward.
    assert operators(cell.set_train(), *inputs)["MatMul"] == (1 + 2 + 2) + (3 + 3) + 3 + 2


def test_the_host_reads_nothing_in_a_step(monkeypatch):
    network = Chain(SMALL, 3)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(), clip_norm=1.0, ema_decay=0.9).set_train()
    x = Tensor(np.ones((2, SMALL), np.float32))
    cell(x)
    reads = []
    for name in ("asnumpy", "item", "__bool__", "__float__", "__int__"):
        read = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda tensor, *args, name=name, read=read: (reads.append(name), read(tensor, *args))[1]
        )
    outputs = cell(x)
    assert reads == []
    assert not bool(outputs[1])
    assert reads
