"""Profiling gradients."""

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale._check import check_number, check_scale
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.batches import each_batch
from ms_lossscale.diagnosis.distribution import Distribution
from ms_lossscale.diagnosis.gradient_report import GradientReport
from ms_lossscale.diagnosis.replay import replay, running
from ms_lossscale.diagnosis.trained_part import trained_parts


def profile_gradients(network, parameters=None, batches=None, *, loss_scale=1.0, clip=None):
    """
    Counts how the gradients of each parameter are spread over float16's range, over some batches.

    Runs forward and backward in PyNative mode and updates nothing: the network is the same afterwards, BatchNorm's
    statistics and MindSpore's mode included. Of each parameter it keeps counts by binade, so that memory does not grow
    with the batches.

    Where training itself runs in PyNative mode, dropout goes on with other random numbers, whose state MindSpore keeps
    inside the operators.

    A training cell of this package knows its networks and weights: ``profile_gradients(cell, batches)`` .

    Args:
        network (Cell): Returns the loss, as :class:`mindspore.nn.WithLossCell` does; or a training cell.
        parameters (list[Parameter], optional): The parameters to differentiate by. Not given for a training cell.
            Default: ``None`` , all that are trainable.
        batches (iterable): For each batch the tuple of the network's inputs; or a dataset.
        loss_scale (float): The loss is multiplied by it, and the gradients are divided by it in float32 before they
            are counted. A network that computes in float16 underflows on the way at too small a scale: compare two.
            Default: ``1.0`` .
        clip (float, optional): The global norm to which the unscaled gradients of one optimizer are clipped before
            they are counted, as `clip_norm` of the training cells does it. The recommended scale is that for the
            gradients before, since those are what the backward computes. Default: ``None`` .

    Returns:
        GradientReport.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If there are no batches, `parameters` is empty or not the network's, or a number is out of range.
        RuntimeError: If the network fails on a batch, or returns no loss.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from ms_lossscale import profile_gradients
        >>> net = nn.Dense(2, 1, weight_init="ones", has_bias=False)
        >>> network = nn.WithLossCell(net, nn.MSELoss())
        >>> batch = np.full((4, 2), 1e-5, np.float32), np.zeros((4, 1), np.float32)
        >>> report = profile_gradients(network, net.trainable_params(), [batch])
        >>> report.parameters["weight"].shares()
        Shares(flushed=1.0, subnormal=0.0, overflowed=0.0)
        >>> report.recommended_loss_scale
        35184372088832.0
    """
    owner = "profile_gradients"
    if batches is None and isinstance(network, TrainingCell):
        parameters, batches = None, parameters
    parts = trained_parts(owner, network, parameters)
    loss_scale = check_scale(owner, "loss_scale", loss_scale)
    if clip is not None and not check_number(owner, "clip", clip) > 0:
        raise ValueError(f"For '{owner}', the argument 'clip' must be a number > 0, but got {clip!r}.")
    steps = network.steps_made() if isinstance(network, TrainingCell) else None
    count = 0
    with replay([part.network for part in parts]):
        profile = _Profile(parts, loss_scale, clip)
        for batch in each_batch(owner, batches):
            with running(owner, f"batches[{count}]"):
                profile.add(batch)
            count += 1
    return GradientReport(
        profile.distributions, count, loss_scale, clip, profile.largest, profile.non_finite_losses, steps
    )


class _Profile:
    def __init__(self, parts, loss_scale, clip):
        self._parts = [(part, part.loss_and_grads()) for part in parts]
        self._loss_scale = Tensor(loss_scale, mstype.float32)
        self._unscale = np.float32(1.0 / loss_scale)
        self._clip = clip
        self.distributions = {weight.name: Distribution() for part in parts for weight in part.weights}
        self.largest = None
        self.non_finite_losses = 0

    def add(self, batch):
        losses_are_finite = True
        for part, loss_and_grads in self._parts:
            loss, grads = loss_and_grads(self._loss_scale, *part.inputs(batch))
            losses_are_finite &= bool(np.isfinite(loss.astype(mstype.float32).asnumpy()).all())
            grads = [grad.astype(mstype.float32).asnumpy() * self._unscale for grad in grads]
            self._note_largest(grads)
            for weight, grad in zip(part.weights, self._clipped(grads)):
                self.distributions[weight.name].add(grad)
        self.non_finite_losses += not losses_are_finite

    def _note_largest(self, grads):
        for grad in grads:
            largest = float(np.max(np.abs(grad), initial=0.0, where=np.isfinite(grad)))
            if largest > 0:
                self.largest = max(largest, self.largest or 0.0)

    def _clipped(self, grads):
        if self._clip is None:
            return grads
        norm = np.sqrt(sum(np.sum(np.square(grad, dtype=np.float64)) for grad in grads))
        # Without an effect on what is not finite: it must be counted as such.
        return [grad * np.float32(self._clip / norm) for grad in grads] if self._clip < norm < np.inf else grads
