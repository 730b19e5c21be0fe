"""Profiling gradients."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Optional, Union

import mindspore
import numpy as np
from mindspore import Parameter
from mindspore import dtype as mstype

from ms_lossscale._arguments import Batches, check_number, check_scale
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.arguments import each_batch, not_finite_weights_of, trained_parts
from ms_lossscale.diagnosis.distribution import SMALLEST_NORMAL, Distribution
from ms_lossscale.diagnosis.gradient_report import GradientReport, NetworksReport, largest_scale
from ms_lossscale.diagnosis.replay import replay, running
from ms_lossscale.diagnosis.report import one_or_each
from ms_lossscale.function_network import Network

# How much smaller the next scale to try is where gradients overflow, how much larger where all of them are zero, and
# how large it gets then.
DOWN, UP, HIGHEST = 2.0**4, 2.0**16, 2.0**64

# Below it bfloat16, with its 8 bits, holds numbers that float16 does not.
_FINER_IN_BFLOAT16 = np.float32(2.0**-17)


def profile_gradients(
    network: Network,
    parameters: Union[Sequence[Parameter], Batches, None] = None,
    batches: Optional[Batches] = None,
    *,
    loss_scale: Optional[float] = None,
    clip: Optional[float] = None,
) -> GradientReport:
    """
    Counts, over some batches, how the gradients of each parameter are spread over float16's range.

    It runs forward and backward in PyNative mode and updates nothing. The network is the same afterwards, including
    BatchNorm's statistics, and so is MindSpore's mode. Only dropout goes on with other random numbers if training
    itself runs in PyNative mode. For each parameter it keeps counts by binade, so the memory does not grow with the
    batches.

    A network that takes a gradient in its forward (a gradient penalty) is run in graph mode, because PyNative mode
    loses second derivatives. If it does not compile, a warning says what is missing. A network that runs only in graph
    mode is run there, too, if MindSpore is set to graph mode.

    A training cell of this package knows its networks and weights: ``profile_gradients(cell, batches)`` .

    Args:
        network (Union[Cell, Callable]): Returns the loss, as :class:`mindspore.nn.WithLossCell` does; or a training
            cell; or a function, such as the one that you differentiate around a :class:`ManualStep`. A function may
            return a tuple, whose first item is then the loss. If it scales the loss with :meth:`ManualStep.scale`, the
            loss stays as it is here.
        parameters (list[Parameter], optional): The parameters to differentiate with respect to. Leave it out for a
            training cell. Default: ``None`` , all trainable ones.
        batches (iterable): A tuple of the network's inputs for each batch; or a dataset. The batches of an iterator are
            kept in memory for a second pass, unless `loss_scale` is given.
        loss_scale (float, optional): The scale by which the loss is multiplied. The gradients are divided by it in
            float32 before they are counted. If it is too small, a float16 network underflows on the way. Default:
            ``None`` . A training cell then uses its present scale, or those of its networks. A plain network uses 1; if
            float16 underflows there, a second pass uses the scale that the first one recommends. If gradients overflow
            at a scale, it is replaced by one 16 times smaller, down to 1, or to the cell's `min_loss_scale` if that is
            smaller.
        clip (float, optional): The global norm to which the unscaled gradients of one optimizer are clipped before they
            are counted, as with `clip_norm` of the training cells. The recommended scale is that for the gradients
            before clipping, because these are what the backward computes. Default: ``None`` .

    Returns:
        GradientReport. If each network of a training cell has its own loss scale, it holds a report for each of them.

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
    if loss_scale is not None:
        loss_scale = check_scale(owner, "loss_scale", loss_scale)
    elif isinstance(batches, Iterator):
        batches = _Kept(batches)
    if clip is not None and not check_number(owner, "clip", clip) > 0:
        raise ValueError(f"For '{owner}', the argument 'clip' must be a number > 0, but got {clip!r}.")
    in_pynative = mindspore.get_context("mode") == mindspore.PYNATIVE_MODE
    with replay(owner, parts) as loss_and_grads:
        passes = [_passes(part, loss_scale) for part in parts]
        profiles = _run(owner, loss_and_grads, passes, batches, clip)
    if in_pynative:
        for each in (each for each in loss_and_grads if each.compiles):
            each.warn("training in it lacks them", "Train in graph mode, which keeps them; the report has them.")
    step = network.steps_made() if isinstance(network, TrainingCell) else None
    if isinstance(network, TrainingCell) and isinstance(network.loss_scale, list):
        networks = [_report(GradientReport, [profile], clip, step) for profile in profiles]
        return _report(NetworksReport, profiles, clip, step, networks=networks)
    return _report(GradientReport, profiles, clip, step)


def _report(report_class, profiles, clip, step, **keywords):
    """Returns one report of all these profiles."""
    return report_class(
        parameters={name: each for profile in profiles for name, each in profile.distributions.items()},
        batches=profiles[0].batches,
        loss_scale=one_or_each([profile.loss_scale for profile in profiles]),
        clip=clip,
        largest=max((profile.largest for profile in profiles if profile.largest is not None), default=None),
        non_finite_losses=len(set().union(*(profile.non_finite_losses for profile in profiles))),
        step=step,
        quantised=[name for profile in profiles for name in profile.quantised()],
        ceiling=min((profile.ceiling for profile in profiles if profile.ceiling is not None), default=None),
        not_finite_weights=not_finite_weights_of([profile.part for profile in profiles]),
        unreached=[profile.part.optimizer for profile in profiles if profile.is_zero()],
        **keywords,
    )


class _Kept:
    """Keeps what an iterator gives, so that it can be iterated over again, even after an interruption."""

    def __init__(self, iterator):
        self._iterator = iterator

    def __iter__(self):
        self._iterator, copy = itertools.tee(self._iterator)
        return copy


def _run(owner, loss_and_grads, passes, batches, clip):
    """Runs the batches until no part wants a further pass. Returns the parts' profiles."""
    profiles = [None] * len(passes)
    waiting = {i: next(each) for i, each in enumerate(passes)}
    while waiting:
        of_pass = {i: _Profile(loss_and_grads[i], *scale, clip) for i, scale in waiting.items()}
        for batch in each_batch(owner, batches):
            wanted = [profile for profile in of_pass.values() if not profile.is_given_up]
            if not wanted:
                break
            with running(owner, f"batches[{wanted[0].batches}]"):
                for profile in wanted:
                    profile.add(batch)
        for i, profile in of_pass.items():
            try:
                waiting[i] = passes[i].send(profile)
            except StopIteration as end:
                profiles[i] = end.value
                del waiting[i]
        loss_and_grads[0].restore()
    return profiles


def _passes(part, loss_scale):
    """
    Yields, for each pass that a part wants over the batches, its loss scale and the smallest one that may follow if
    gradients overflow. It is sent what the pass found, and returns what is to be reported.
    """
    if loss_scale is not None:
        return (yield loss_scale, loss_scale)
    profile = yield from _without_overflow(part.loss_scale or 1.0, part.floor)
    if part.loss_scale is not None:
        return profile
    while profile.quantised():
        is_known = profile.largest is not None
        larger = largest_scale(profile.largest) if is_known else profile.loss_scale * UP
        if larger <= profile.loss_scale or (larger > HIGHEST and not is_known):
            break
        finer = yield from _without_overflow(larger, profile.loss_scale * DOWN)
        if finer.overflowed:
            profile.ceiling = profile.loss_scale
            break
        profile = finer
        if is_known:
            break
    return profile


def _without_overflow(scale, smallest):
    profile = yield scale, smallest
    while profile.is_given_up:
        profile = yield max(profile.loss_scale / DOWN, smallest), smallest
    if profile.loss_scale < scale:
        profile.ceiling = profile.loss_scale
    return profile


class Float16Traces:
    """
    Examines gradients as the backward returned them, multiplied by the loss scale.

    Attributes:
        all_fit (bool): Whether float16 holds each finite value exactly.
        lost (bool): Whether a value is zero, or so small that float16 holds it with fewer bits than a normal one.
    """

    def __init__(self):
        self.all_fit = True
        self.lost = False
        self._is_finer_than_bfloat16 = False

    def add(self, values):
        """Examines the values of a float32 array."""
        if not self.all_fit:
            return
        finite = np.abs(values[np.isfinite(values)])
        sizes = finite[finite > 0]
        with np.errstate(over="ignore", under="ignore"):
            self.all_fit = bool((sizes.astype(np.float16) == sizes).all())
        self.lost |= sizes.size < finite.size or bool((sizes < SMALLEST_NORMAL).any())
        bits_that_bfloat16_lacks = sizes.view(np.uint32) & 0xFFFF
        self._is_finer_than_bfloat16 |= bool(((bits_that_bfloat16_lacks > 0) | (sizes < _FINER_IN_BFLOAT16)).any())

    @property
    def are_evident(self):
        """Whether the values almost certainly come from float16: float32 values would have more bits."""
        return self.all_fit and self._is_finer_than_bfloat16


class _Profile:
    """The gradients of one part in one pass over the batches."""

    def __init__(self, loss_and_grads, loss_scale, smallest_scale, clip):
        self._loss_and_grads = loss_and_grads
        self.part = loss_and_grads.part
        self.loss_scale = loss_scale
        self._smallest_scale = smallest_scale
        self._unscale = np.float32(1.0 / loss_scale)
        self._clip = clip
        self.distributions = {weight.name: Distribution() for weight in self.part.weights}
        self._traces = {weight.name: Float16Traces() for weight in self.part.weights}
        self.largest = None
        self.batches = 0
        # The numbers of batches whose loss is not finite, and whether another batch had gradients that are not.
        self.non_finite_losses = set()
        self.overflowed = False
        # The loss scale, if larger ones overflowed.
        self.ceiling = None

    def add(self, batch):
        loss, grads = self._loss_and_grads.correct(self.loss_scale, batch)
        grads = [grad.astype(mstype.float32).asnumpy() for grad in grads]
        if not np.isfinite(loss.astype(mstype.float32).asnumpy()).all():
            self.non_finite_losses.add(self.batches)
        elif not all(np.isfinite(grad).all() for grad in grads):
            self.overflowed = True
        self.batches += 1
        for trace, grad in zip(self._traces.values(), grads):
            trace.add(grad)
        grads = [grad * self._unscale for grad in grads]
        for grad in grads:
            largest = float(np.max(np.abs(grad), initial=0.0, where=np.isfinite(grad)))
            self.largest = max(largest, self.largest or 0.0) or None
        for weight, grad in zip(self.part.weights, self._clipped(grads)):
            self.distributions[weight.name].add(grad)

    def _clipped(self, grads):
        if self._clip is None:
            return grads
        norm = np.sqrt(sum(np.sum(np.square(grad, dtype=np.float64)) for grad in grads))
        # Values that are not finite stay so, since they must be counted as such.
        return [grad * np.float32(self._clip / norm) for grad in grads] if self._clip < norm < np.inf else grads

    def is_zero(self):
        """Returns whether all gradients are exactly zero."""
        return all(each.is_all_zero for each in self.distributions.values())

    @property
    def is_given_up(self):
        """Whether there will be another pass at a smaller scale."""
        return self.overflowed and self.loss_scale > self._smallest_scale

    def quantised(self):
        """Returns the names of the weights whose gradients lost something in float16 on the way."""
        traces = self._traces.items()
        if not (any(trace.are_evident for _, trace in traces) or computes_in_float16(self.part.network)):
            return []
        return [name for name, trace in traces if trace.all_fit and trace.lost]


def computes_in_float16(network):
    """Returns whether cells or weights say that they are float16. A cast in a `construct` does not count."""
    return any(weight.dtype == mstype.float16 for weight in network.get_parameters()) or any(
        cell.get_flags().get("fp16", False) for _, cell in network.cells_and_names()
    )
