"""A callback that ends the last accumulation cycle of an epoch."""

from mindspore.train import Callback, RunContext


class FlushAccumulation(Callback):
    """
    Calls `flush()` of the training cell at the end of each epoch of :meth:`mindspore.train.Model.train`, so that the
    epoch's last, partial accumulation cycle is averaged over the calls that it really had.

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
        """
        Ends the partial accumulation cycle.

        Raises:
            TypeError: If the training cell has no `flush()`.
        """
        network = run_context.original_args().train_network
        if not hasattr(network, "flush"):
            raise TypeError(
                f"For 'FlushAccumulation', the training cell must be one of ms_lossscale, but got a "
                f"'{type(network).__name__}'. Pass Model a ScaledTrainOneStepCell, say, without loss_fn and optimizer."
            )
        network.flush()
