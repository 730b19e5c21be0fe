"""What all training cells let their user read: gradient norms and averaged weights."""

from ms_lossscale.step.moving_average import averages_in_place


class Measurements:
    """Methods for a training cell that has `_clippings()` and `_moving_averages()`."""

    def grad_norm(self):
        """
        Reads the global norms of the gradients, before clipping, at each network's last verdict.

        Returns:
            list, with a float for each network (not finite if that step was skipped because of its gradients), or None
            where no `clip_norm` is set.

        Raises:
            RuntimeError: If no `clip_norm` is set.
        """
        norms = [clipping.norm() if clipping.measures else None for clipping in self._clippings()]
        if norms == [None] * len(norms):
            raise RuntimeError(
                f"For '{type(self).__name__}', 'grad_norm()' needs 'clip_norm': nothing measures the norm without it. "
                f'Construct the cell with clip_norm=float("inf") to measure and not clip.'
            )
        return norms

    def ema_parameters(self):
        """
        The exponential moving average of the weights.

        Returns:
            dict, from the weights' names to float32 Parameters.

        Raises:
            RuntimeError: If no `ema_decay` is set.
        """
        averages = {}
        for moving_average in self._checked_moving_averages("ema_parameters"):
            averages.update(moving_average.as_dict())
        return averages

    def ema_weights(self):
        """
        A context in which the weights hold their exponential moving average, for evaluation. It puts the trained
        weights back, exactly, also if the evaluation raises.

        Returns:
            Context manager.

        Raises:
            RuntimeError: If no `ema_decay` is set.
        """
        return averages_in_place(self._checked_moving_averages("ema_weights"))

    def _checked_moving_averages(self, method):
        moving_averages = self._moving_averages()
        if not moving_averages:
            raise RuntimeError(
                f"For '{type(self).__name__}', '{method}()' needs 'ema_decay': no average is kept without it. "
                f"Construct the cell with ema_decay=0.999, say."
            )
        return moving_averages
