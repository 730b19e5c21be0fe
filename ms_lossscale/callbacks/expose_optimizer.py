"""A callback that shows MindSpore's learning-rate callbacks the optimizer of a training cell."""

from typing import Optional

from mindspore import experimental, nn
from mindspore.train import Callback, RunContext


class ExposeOptimizer(Callback):
    """
    Shows the optimizer of the training cell to the callbacks after it. :class:`mindspore.train.LearningRateScheduler`,
    :class:`mindspore.train.ReduceLROnPlateau` and others look for the optimizer that you passed to `Model`, but
    ``Model(cell)`` has none.

    Put it before them in the list of callbacks. If the cell has several optimizers, put one before each of these
    callbacks, with the optimizer whose learning rate that callback should change.

    Args:
        optimizer (Optimizer, optional): Which of the cell's optimizers to show. Default:
            ``None`` , the cell's `optimizer`. For a cell with several optimizers, this shows the learning rate of the
            first one if that is a schedule, and refuses a constant one, which could be changed.

    Raises:
        TypeError: When training begins, if the network of `Model` has no optimizer, or if the optimizer is one of
            `mindspore.experimental` or `mindspore.mint`, which keep their learning rates where such callbacks do not
            look.
        ValueError: When training begins, if `optimizer` is not one of the cell's optimizers.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import dataset, nn
        >>> from mindspore.train import LearningRateScheduler, Model
        >>> from ms_lossscale import DynamicLossScale, ExposeOptimizer, ScaledTrainOneStepCell
        >>> network = nn.Dense(4, 1)
        >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.5, momentum=0.9)
        >>> cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, DynamicLossScale())
        >>> data = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}
        >>> batches = dataset.NumpySlicesDataset(data).batch(2)
        >>> halve = LearningRateScheduler(lambda learning_rate, step: learning_rate / 2)
        >>> Model(cell).train(1, batches, callbacks=[ExposeOptimizer(), halve], dataset_sink_mode=False)
        >>> print(optimizer.learning_rate.asnumpy())
        0.03125
    """

    def __init__(self, optimizer: Optional[nn.Cell] = None) -> None:
        super().__init__()
        self._optimizer = optimizer

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks the optimizer, and shows it."""
        network = run_context.original_args().network
        of_cell = getattr(network, "optimizer", None)
        if of_cell is None:
            raise TypeError(
                f"For 'ExposeOptimizer', the network of Model must be a training cell, but got a "
                f"'{type(network).__name__}', which has no optimizer. Pass Model a ScaledTrainOneStepCell, say, and "
                f"no optimizer."
            )
        shown = of_cell if self._optimizer is None else self._optimizer
        if isinstance(shown, experimental.optim.Optimizer):
            raise TypeError(
                f"For 'ExposeOptimizer', the optimizer must be one of mindspore.nn, but the {type(shown).__name__} "
                f"keeps its learning rates in 'param_groups'. Set them in a callback of your own, with "
                f'ops.assign(optimizer.param_groups[0]["lr"], ...).'
            )
        if not any(shown is each for each in (of_cell, *getattr(of_cell, "optimizers", ()))):
            raise ValueError(
                f"For 'ExposeOptimizer', the argument 'optimizer' must be one of the training cell's, but got another "
                f"{type(shown).__name__}. Pass the same object that you passed to the cell."
            )
        self._shown = shown
        self.on_train_step_end(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Shows the optimizer again: another one may have been shown since."""
        run_context.original_args().optimizer = self._shown

    on_train_epoch_end = on_train_step_end
