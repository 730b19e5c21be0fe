"""A callback that evaluates with the moving averages of the weights."""

import contextlib
import numbers
from collections.abc import Callable
from typing import Any, Optional

import mindspore
from mindspore.train import Callback, RunContext

from ms_lossscale._arguments import StrPath, check_file, describe
from ms_lossscale._output import warn_user
from ms_lossscale.cells.training_state import TrainingState


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
            raise TypeError(
                f"For 'EvaluateAverages', the argument 'evaluate' must be a function without arguments, or None, but "
                f"got {describe(evaluate)}. Pass lambda: model.eval(dataset), say."
            )
        self._evaluate = evaluate
        self._save = check_file("EvaluateAverages", "save", save)
        # The evaluation of Model.fit that is going on.
        self._evaluation = contextlib.ExitStack()
        self._has_done_nothing = True

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
                with _keeping_modes(cell):
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


def _cell_of(run_context):
    cell = run_context.original_args().network
    if not isinstance(cell, TrainingState):
        raise TypeError(
            f"For 'EvaluateAverages', the network of Model must be a training cell of ms_lossscale, but got "
            f"{describe(cell)}. Pass Model a ScaledTrainOneStepCell with ema_decay, say."
        )
    return cell


@contextlib.contextmanager
def _keeping_modes(cell):
    """A context after which each cell is in training or not as before."""
    modes = [(inner, inner.training) for _, inner in cell.cells_and_names()]
    try:
        yield
    finally:
        for inner, training in modes:
            inner.add_flags(training=training)


def _written(results):
    if isinstance(results, dict):
        return ", ".join(f"{name} {_written(value)}" for name, value in results.items())
    return f"{results:.6g}" if isinstance(results, numbers.Real) else str(results)
