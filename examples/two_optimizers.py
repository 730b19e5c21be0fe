"""
Trains the matrices of a network with one optimizer and all else with another, in one training cell: one Cell around
both is an optimizer. Prints how far each weight has moved.
"""

import mindspore
import numpy as np
from mindspore import ParameterTuple, Tensor, nn

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


class TwoOptimizers(nn.Cell):
    """
    Updates with the first optimizer what has two axes, and with the second all else.

    Args:
        net (Cell): Whose weights are trained.
        make_first (Callable): Called with the matrices, returns their optimizer.
        make_second (Callable): Called with the other weights, returns theirs.
    """

    def __init__(self, net, make_first, make_second):
        super().__init__(auto_prefix=False)  # The weights keep their names.
        weights = net.trainable_params()
        matrices = [weight for weight in weights if weight.ndim == 2]
        others = [weight for weight in weights if weight.ndim != 2]
        self.first = make_first(matrices)
        self.second = make_second(others)
        self.parameters = ParameterTuple(matrices + others)  # The gradients come in this order.
        self.count = len(matrices)
        for state in self.first.get_parameters():
            if not any(state is weight for weight in weights):
                state.name = "first." + state.name  # Both have a global_step.

    def construct(self, grads):
        return self.first(grads[: self.count]), self.second(grads[self.count :])


def main():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = nn.Dense(4, 1, weight_init="zeros", bias_init="zeros")
    optimizer = TwoOptimizers(
        net, lambda matrices: nn.SGD(matrices, 0.25), lambda others: nn.AdamWeightDecay(others, 1e-3)
    )
    network = nn.WithLossCell(net, nn.MSELoss())
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale()).set_train()
    cell(Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones((2, 1), np.float32)))
    for weight in optimizer.parameters:
        print(f"{weight.name}: {weight.asnumpy().max():.3f}")
    print("saved:", *sorted(cell.parameters_dict()))


if __name__ == "__main__":
    main()
