"""The mean loss of an accumulation cycle."""

import numpy as np


class MeanLoss:
    """
    The mean over the calls of a cycle that a monitor is told of, by weight if their losses have weights. Dropped calls
    are not in it.
    """

    def __init__(self):
        # The losses and the weights, one for each network, of each call of the present cycle; None of dropped ones.
        self._calls = []

    def add(self, losses, before, after):
        """Adds a call, given the states before and after it."""
        is_dropped = after.dropped_calls > before.dropped_calls
        self._calls.append(None if is_dropped else (losses, _weights(losses, before, after)))

    def end(self, before, after):
        """Returns the mean of a cycle that ended between the states; None if none did, or all calls were dropped."""
        # What is no more of the present cycle is of the one that ended, or `discard` has dropped it.
        count = max(0, len(self._calls) - after.calls)
        kept = [call for call in self._calls[:count] if call is not None]
        self._calls = self._calls[count:]
        if after.steps == before.steps or not kept:
            return None
        losses, weights = map(np.array, zip(*kept))
        return float(np.sum(np.sum(losses * _or_one(weights), axis=0) / _or_one(weights.sum(axis=0))))


def _weights(losses, before, after):
    """Returns the weights of a call's losses."""
    if after.weights is None:
        return np.ones(len(losses))
    if after.calls == 0:
        weights = after.weights_of_last_cycle - before.weights
    elif after.calls == 1:
        weights = after.weights
    else:
        weights = after.weights - before.weights
    # A ManualStep has one loss for all networks.
    return weights[: len(losses)]


def _or_one(weights):
    """Returns 1 in the place of 0: the loss of a call without weight is the sum itself."""
    return np.where(weights > 0, weights, 1.0)
