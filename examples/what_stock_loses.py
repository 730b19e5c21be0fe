"""
Two things that go wrong with MindSpore alone, in seconds: an optimizer that never divides by the loss scale, and a
BatchNorm that keeps what a skipped step has seen. Each is shown beside the same training with ms_lossscale.
"""

import mindspore
import numpy as np
from mindspore import Tensor, amp, nn
from mindspore.experimental import optim

from ms_lossscale import DynamicLossScale, ManualStep, ScaledTrainOneStepCell

LOSS_SCALE = 1024.0


def movement(make_cell):
    """How far one step of SGD moves a weight."""
    network = nn.Dense(4, 1, weight_init="ones", has_bias=False)
    cell = make_cell(network, optim.SGD(network.trainable_params(), lr=2.0**-13))
    cell(Tensor(np.ones((1, 4), np.float32)))
    return 1 - float(network.weight.asnumpy()[0, 0])


def show_division():
    unscaled = movement(nn.TrainOneStepCell)
    stock = movement(lambda network, optimizer: nn.TrainOneStepCell(network, optimizer, sens=LOSS_SCALE))
    ours = movement(lambda network, optimizer: ScaledTrainOneStepCell(network, optimizer, LOSS_SCALE))
    print("One step of mindspore.experimental.optim.SGD at loss scale 1024, compared with one without a scale:")
    print(f"    nn.TrainOneStepCell(..., sens=1024)     moves the weights {stock / unscaled:g} times as far")
    print(f"    ScaledTrainOneStepCell(..., 1024)       moves the weights {ours / unscaled:g} times as far")


def network_and_loss():
    network = nn.SequentialCell(nn.Dense(4, 4), nn.BatchNorm1d(4), nn.Dense(4, 1))
    return amp.auto_mixed_precision(network, "O2"), nn.MSELoss()


def batches():
    """The third of four holds a value that is too large for float16, so that its step is skipped."""
    rng = np.random.default_rng(0)
    for number in range(4):
        x = rng.normal(size=(8, 4)).astype(np.float32)
        if number == 2:
            x[0, 0] = 1e6
        yield Tensor(x), Tensor(np.ones((8, 1), np.float32))


def skipped_steps_by_hand(network, loss_fn):
    """The loop of MindSpore's tutorial on mixed precision."""
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    scaler = amp.DynamicLossScaler(scale_value=LOSS_SCALE, scale_factor=2, scale_window=1000)

    def forward(x, y):
        loss = loss_fn(network(x), y)
        return scaler.scale(loss), loss

    value_and_grad = mindspore.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
    skipped = 0
    for x, y in batches():
        _, grads = value_and_grad(x, y)
        finite = amp.all_finite(grads)
        if finite:
            optimizer(scaler.unscale(grads))
        scaler.adjust(finite)
        skipped += not finite
    return skipped


def skipped_steps(network, loss_fn):
    """The same loop with a ManualStep."""
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    step = ManualStep(network, optimizer, DynamicLossScale(LOSS_SCALE, scale_window=1000))

    def forward(x, y):
        return loss_fn(network(x), y)

    value_and_grad = step.value_and_grad(forward)
    skipped = 0
    for x, y in batches():
        _, grads = value_and_grad(*step.begin(x, y))
        skipped += bool(step.end(grads))
    return skipped


def show_batch_norm():
    print("A network with BatchNorm is evaluated after four steps, of which one was skipped:")
    for name, train in (("amp.DynamicLossScaler and all_finite", skipped_steps_by_hand), ("ManualStep", skipped_steps)):
        network, loss_fn = network_and_loss()
        skipped = train(network.set_train(), loss_fn)
        network.set_train(False)
        predicted = network(Tensor(np.ones((8, 4), np.float32))).asnumpy()
        spoilt = np.logical_not(np.isfinite(predicted)).sum()
        print(f"    {name:39} {skipped} skipped, {spoilt} of {predicted.size} predictions are not finite")


if __name__ == "__main__":
    mindspore.set_seed(0)
    show_division()
    show_batch_norm()
