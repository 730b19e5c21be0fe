"""Callbacks that do around the steps of Model what a training cell needs: evaluate averages, show optimizers, flush."""

import contextlib
import numbers
from collections.abc import Callable
from typing import Any, Optional

import mindspore
from mindspore import experimental, nn
from mindspore.train import Callback, RunContext

from ms_lossscale._arguments import StrPath, check_file, looks_like_optimizer, must_be
from ms_lossscale._mindspore.cells import keeping_modes
from ms_lossscale._warn_user import warn_user
from ms_lossscale.cells.training_state import TrainingState
from ms_lossscale.step.optimizers import updating


class EvaluateAverages(Callback):
    """
    Evaluates with the moving averages of the weights that the training cell keeps with `ema_decay`. In
    :meth:`mindspore.train.Model.fit`, each evaluation is made with them. In :meth:`mindspore.train.Model.train`, which
    evaluates nothing, pass a function that is called at the end of each epoch. Afterwards the weights are the trained
    ones again, bit for bit.

    Put :class:`FlushAccumulation` before it.

    Args:
        evaluate (Callable, optional): A function without arguments, ``lambda: model.eval(dataset)`` say, that is called
            at the end of each epoch while the weights hold the averages. What it returns is printed: a dict from names
            to numbers, or a number. The cells are then in training or not as they were before. Default: ``None`` .
        save (str, optional): A checkpoint that is written at the end of each epoch over that of the epoch before: what
            the network holds, with the averages as its weights, for :func:`mindspore.load_param_into_net` into the
            network. With several ranks, give each a file of its own. Default: ``None`` .

    Raises:
        TypeError: If `evaluate` can't be called or `save` is no path. When training begins, if the training cell is not
            one of this package.
        ValueError: If the folder of `save` does not exist, or `save` is a folder.
        RuntimeError: When training begins, if the training cell has no `ema_decay`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import dataset, nn
        >>> from mindspore.train import Loss, Model
        >>> from ms_lossscale import EvaluateAverages, ScaledTrainOneStepCell
        >>> network = nn.Dense(4, 1, weight_init="zeros", bias_init="zeros")
        >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> loss = nn.WithLossCell(network, nn.MSELoss())
        >>> cell = ScaledTrainOneStepCell(loss, optimizer, 128, ema_decay=0.5)
        >>> evaluation = nn.WithEvalCell(network, nn.MSELoss())
        >>> model = Model(cell, eval_network=evaluation, metrics={"loss": Loss()}, eval_indexes=[0, 1, 2])
        >>> def batches():
        ...     data = {"x": np.ones((4, 4), np.float32), "y": np.ones((4, 1), np.float32)}
        ...     return dataset.NumpySlicesDataset(data).batch(2)
        ...
        >>> averages = EvaluateAverages(lambda: model.eval(batches()))
        >>> model.train(2, batches(), callbacks=[averages], dataset_sink_mode=False)
        epoch 1, averages: loss 0.04
        epoch 2, averages: loss 0.044944
    """

    def __init__(self, evaluate: Optional[Callable[[], Any]] = None, save: Optional[StrPath] = None) -> None:
        super().__init__()
        if evaluate is not None and not callable(evaluate):
            what = "a function without arguments, or None"
            cure = "Pass lambda: model.eval(dataset), say."
            raise TypeError(must_be("EvaluateAverages", "evaluate", what, evaluate, cure))
        self._evaluate = evaluate
        self._save = check_file("EvaluateAverages", "save", save)
        # The evaluation of Model.fit that is going on.
        self._evaluation = contextlib.ExitStack()

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks that the training cell keeps averages."""
        _cell_of(run_context).ema_parameters()
        self._has_done_nothing = True

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Puts the averages into the weights."""
        self._has_done_nothing = False
        self._evaluation.enter_context(_cell_of(run_context).ema_weights())

    def on_eval_end(self, run_context: RunContext) -> None:
        """Puts the trained weights back."""
        self._evaluation.close()

    def __exit__(self, *error: Any) -> None:
        # If the evaluation raises.
        self._evaluation.close()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Calls `evaluate`, prints what it returns, and saves."""
        if self._evaluate is None and self._save is None:
            return
        self._has_done_nothing = False
        cell = _cell_of(run_context)
        with cell.ema_weights():
            if self._evaluate is not None:
                with keeping_modes([cell]):
                    results = self._evaluate()
                if results is not None:
                    print(f"epoch {run_context.original_args().cur_epoch_num}, averages: {_written(results)}")
            if self._save is not None:
                mindspore.save_checkpoint(cell.network, str(self._save))

    def on_train_end(self, run_context: RunContext) -> None:
        """Warns if there was nothing to do."""
        if self._has_done_nothing:
            warn_user(
                "For 'EvaluateAverages', nothing was evaluated or saved: Model.train evaluates nothing. Pass a "
                "function, EvaluateAverages(lambda: model.eval(dataset)) say, or train with Model.fit."
            )


def training_cell(owner: str, cell: Any) -> TrainingState:
    """Returns what a callback, or its user, was given as the training cell. Raises a TypeError if it is none."""
    if not isinstance(cell, TrainingState):
        raise TypeError(
            f"For '{owner}', the training cell must be one of ms_lossscale, or a ManualStep, but got a "
            f"'{type(cell).__name__}'. Pass Model a ScaledTrainOneStepCell, say, without loss_fn and optimizer."
        )
    return cell


def _cell_of(run_context):
    # With data sinking on Ascend and GPU, `train_network` is MindSpore's wrapper around it.
    return training_cell("EvaluateAverages", run_context.original_args().network)


def _written(results):
    if isinstance(results, dict):
        return ", ".join(f"{name} {_written(value)}" for name, value in results.items())
    return f"{results:.6g}" if isinstance(results, numbers.Real) else str(results)


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
        TypeError: If `optimizer` is no optimizer. When training begins, if the network of `Model` has no optimizer, or
            if the optimizer is one of `mindspore.experimental` or `mindspore.mint`, which keep their learning rates
            where such callbacks do not look.
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
        if optimizer is not None and not looks_like_optimizer(optimizer):
            cure = "Pass one of those that you pass to the training cell."
            raise TypeError(must_be("ExposeOptimizer", "optimizer", "an optimizer or None", optimizer, cure))
        self._optimizer = optimizer

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks the optimizer, and shows it."""
        network = run_context.original_args().network
        trained = getattr(network, "optimizer", None)
        if trained is None:
            raise TypeError(
                f"For 'ExposeOptimizer', the network of Model must be a training cell, but got a "
                f"'{type(network).__name__}', which has no optimizer. Pass Model a ScaledTrainOneStepCell, say."
            )
        shown = trained if self._optimizer is None else self._optimizer
        updates = updating(shown)
        if isinstance(updates, experimental.optim.Optimizer):
            raise TypeError(
                f"For 'ExposeOptimizer', the optimizer must be one of mindspore.nn, but the {type(updates).__name__} "
                f"keeps its learning rates in 'param_groups': assign to these, in a callback of your own."
            )
        if not any(shown is optimizer for optimizer in (trained, *getattr(trained, "optimizers", ()))):
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


class FlushAccumulation(Callback):
    """
    Calls `flush()` of the training cell at the end of each epoch of :meth:`mindspore.train.Model.train`. The epoch's
    last, partial accumulation cycle is then averaged over the calls that it really had.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import dataset, nn
        >>> from mindspore.train import Model
        >>> from ms_lossscale import FlushAccumulation, ScaledTrainOneStepCell
        >>> network = nn.Dense(4, 1)
        >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> loss = nn.WithLossCell(network, nn.MSELoss())
        >>> cell = ScaledTrainOneStepCell(loss, optimizer, 128, gradient_accumulation_steps=4)
        >>> data = {"x": np.ones((12, 4), np.float32), "y": np.ones((12, 1), np.float32)}
        >>> batches = dataset.NumpySlicesDataset(data).batch(2)
        >>> Model(cell).train(1, batches, callbacks=[FlushAccumulation()], dataset_sink_mode=False)
        >>> cell.counters()["applied_steps"]
        2
    """

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Ends the partial accumulation cycle."""
        network = run_context.original_args().network
        # A Cell of a user's own may hold the training cell, and pass it on.
        flushing = network if hasattr(network, "flush") else training_cell("FlushAccumulation", network)
        flushing.flush()
