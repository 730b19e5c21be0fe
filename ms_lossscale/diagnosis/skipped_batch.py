"""Looks into the batch of a training that only skips."""

import warnings

from mindspore.communication import GlobalComm

from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.locate_overflow import locate_overflow


def on_every_scale(cell, inputs):
    """
    Says where gradients are not finite at any loss scale, given the inputs of a step. Returns an empty text if they are
    not so, or if it can't be told: with several ranks, of a ManualStep, or if the network runs in graph mode only.
    """
    if GlobalComm.INITED or not isinstance(cell, TrainingCell):
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return locate_overflow(cell, [inputs]).every_scale
        except Exception:
            return ""
