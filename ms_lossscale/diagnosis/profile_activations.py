"""Profiles the values inside a network."""

from functools import partial
from typing import Optional

import numpy as np

from ms_lossscale._arguments import Batches, check_bool, check_scale
from ms_lossscale._mindspore import in_float32, is_cast
from ms_lossscale._values import as_array
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.activation_report import JUMP, ROUNDING, Activation, ActivationReport
from ms_lossscale.diagnosis.arguments import CASTS_BY_HAND, each_batch, trained_parts
from ms_lossscale.diagnosis.cell_watch import CellWatch
from ms_lossscale.diagnosis.distribution import Distribution
from ms_lossscale.diagnosis.replay import replay, running
from ms_lossscale.diagnosis.report import one_or_each
from ms_lossscale.forward_state.find import find_forward_state
from ms_lossscale.function_network import Network
from ms_lossscale.overflow_detector import NoCheck

# How much smaller than the error against float32 the difference between two runs of the same must be.
_LESS = 4.0


def profile_activations(
    network: Network, batches: Batches, *, loss_scale: Optional[float] = None, compare_float32: bool = False
) -> ActivationReport:
    """
    Counts how the outputs of each cell, and the gradients that flow back into them, are spread over float16's range.

    It runs forward and backward in PyNative mode and updates nothing. The network is the same afterwards, including
    BatchNorm's statistics, and so is MindSpore's mode. Only dropout goes on with other random numbers if training
    itself runs in PyNative mode, because MindSpore keeps their state inside the operators.

    If a network takes a gradient in its forward (a gradient penalty), PyNative mode loses second derivatives. The
    gradients that flow back into its cells lack them, and a warning says so. Cells that `vmap` or `jacrev` transforms
    can't be watched, nor can a network that runs only in graph mode; :func:`profile_gradients` works for both.

    Args:
        network (Union[Cell, Callable]): Returns the loss, as :class:`mindspore.nn.WithLossCell` does; or a training
            cell of this package; or a function, as for :func:`profile_gradients`.
        batches (iterable): A tuple of the network's inputs for each batch; or a dataset.
        loss_scale (float, optional): The scale by which the loss is multiplied. The gradients are counted without
            unscaling them. Default: ``None`` . A training cell then uses its present scale, or those of its networks,
            and a plain network uses 1.
        compare_float32 (bool): Whether to run each batch in float32, too, and to compare the values at each cell. Cells
            that compute in float16 or bfloat16 because of `to_float` or `mindspore.amp` then compute in float32. Casts
            that are written in a `construct` stay, and dropout is off. Each batch runs three times: what differs
            between two runs as they are, because the forward draws random numbers, can't be compared, and the report
            says so. Default: ``False`` .

    Returns:
        ActivationReport.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If there are no batches, if `loss_scale` is out of range, or, with `compare_float32` , if
            `to_float` or `mindspore.amp` puts no cell into float16 or bfloat16.
        RuntimeError: If the network fails on a batch, or returns no loss.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from ms_lossscale import profile_activations
        >>> network = nn.WithLossCell(nn.Dense(2, 1, weight_init="ones", has_bias=False), nn.MSELoss())
        >>> batch = np.full((4, 2), 1e-5, np.float32), np.zeros((4, 1), np.float32)
        >>> report = profile_activations(network, [batch])
        >>> print(report.first)
        _backbone output
    """
    owner = "profile_activations"
    parts = trained_parts(owner, network)
    if loss_scale is not None:
        loss_scale = check_scale(owner, "loss_scale", loss_scale)
    scales = [loss_scale or part.loss_scale or 1.0 for part in parts]
    check_bool(owner, "compare_float32", compare_float32)
    cells = {id(cell): cell for part in parts for _, cell in part.network.cells_and_names()}.values()
    cast_cells = [cell for cell in cells if is_cast(cell)]
    if compare_float32 and not cast_cells:
        raise ValueError(
            f"For '{owner}', with compare_float32=True some cell of the network must compute in float16 or bfloat16 "
            f"because of to_float or mindspore.amp, but none does. {CASTS_BY_HAND} If there are none, convert the "
            f"network first: network.to_float(mstype.float16), or mindspore.amp.auto_mixed_precision(network, 'O2')."
        )
    with replay(owner, parts) as loss_and_grads:
        profile = _Profile(loss_and_grads, scales, cast_cells if compare_float32 else [])
        if compare_float32:
            # The two computations would drop different values.
            for dropout in (cell for cell in cells if type(cell).__name__.startswith("Dropout")):
                dropout.add_flags(training=False)
        for count, batch in enumerate(each_batch(owner, batches), start=1):
            with running(owner, f"batches[{count - 1}]"):
                profile.add(batch)
    for each in loss_and_grads:
        each.warn(
            "what flows back into its cells is reported without them",
            "What its cells put out is right, and profile_gradients computes such a network in graph mode.",
        )
    return ActivationReport(
        profile.activations(), count, one_or_each(scales), _forward_state_names(owner, network, parts)
    )


def _forward_state_names(owner, network, parts):
    if isinstance(network, TrainingCell):
        skips = any(not isinstance(step.forwards_and_backwards.overflow_detector, NoCheck) for step in network.steps)
        return network.forward_state_names() if skips else None
    return find_forward_state(owner, (parts[0].network,)).names


class _Profile:
    """The values of batches, and their differences from a run with the cells `to_compare` in float32."""

    def __init__(self, loss_and_grads, loss_scales, to_compare):
        self._loss_and_grads = loss_and_grads
        self._parts = [each.part for each in loss_and_grads]
        self._loss_scales = loss_scales
        self._to_compare = to_compare
        # By part, kind and place, in the order of execution.
        self._seen = {}
        self._last_values = {}

    def add(self, batch):
        self._last_values.clear()
        if self._to_compare:
            self._loss_and_grads[0].restore()
        self._run(batch, self._count)
        if self._to_compare:
            self._run_again(batch, _Seen.vary)
            with in_float32(self._to_compare):
                self._run_again(batch, _Seen.compare)

    def _run_again(self, batch, compare):
        """Compares the values of another run, from the same state, with those that were counted."""
        self._loss_and_grads[0].restore()
        missing = dict(self._last_values)

        def note(key, tensor):
            if key in missing:
                compare(self._seen[key], missing.pop(key), as_array(tensor))

        self._run(batch, note)
        if compare is _Seen.vary:
            for key, values in missing.items():
                self._seen[key].vary(values, None)

    def _run(self, batch, note):
        """Calls `note` with each value, and its part, kind and place."""

        def note_value(i, kind, place, tensor, _=()):
            # One network with several losses has one forward.
            if kind == "gradient" or i == 0 or self._parts[i - 1].network is not self._parts[i].network:
                note((i, kind, place), tensor)

        for i, (part, loss_and_grads) in enumerate(zip(self._parts, self._loss_and_grads)):
            with CellWatch(part, partial(note_value, i, "output"), partial(note_value, i, "gradient")).watching():
                loss_and_grads.in_pynative(self._loss_scales[i], batch)

    def _count(self, key, tensor):
        values = as_array(tensor)
        seen = self._seen.setdefault(key, _Seen(str(tensor.dtype)))
        seen.distribution.add(values)
        if self._to_compare:
            self._last_values[key] = values

    def activations(self):
        """Returns the activations, forward and then backward, with the jumps of the error marked."""
        largest_error = {"output": ROUNDING, "gradient": ROUNDING}
        is_mixed = any(seen.dtype in ("Float16", "BFloat16") for seen in self._seen.values())
        activations = []
        for (i, kind, place), seen in self._seen.items():
            error = seen.relative_error()
            # An infinite error does not jump after an infinite one.
            jumps = error is not None and largest_error[kind] < error >= JUMP * largest_error[kind]
            if error is not None:
                largest_error[kind] = max(error, largest_error[kind])
            if kind == "gradient" and sum(part.network is self._parts[i].network for part in self._parts) > 1:
                kind = f"gradient of losses[{self._parts[i].item}]"
            keeps_float32 = is_mixed and seen.dtype == "Float32"
            varies = seen.varies()
            gained = None if varies else seen.zeros_gained
            activations.append(
                Activation(place, kind, seen.dtype, seen.distribution, error, gained, jumps, keeps_float32, varies)
            )
        return activations


class _Seen:
    """The values at one place."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.distribution = Distribution()
        self.zeros_gained = None
        self._squares = self._squared_errors = self._squared_variation = 0.0

    def vary(self, values, again):
        """Compares with another run of the same, or with None if that did not come here."""
        if again is None or values.shape != again.shape:
            self._squared_variation = np.inf
        else:
            different = (values != again) & ~(np.isnan(values) & np.isnan(again))
            self._squared_variation += _squared_difference(values[different], again[different])

    def compare(self, values, expected):
        """Compares with a run in float32."""
        if values.shape == expected.shape:
            self._squared_errors += _squared_difference(values, expected)
            self._squares += float(np.sum(np.square(expected, dtype=np.float64)))
            self.zeros_gained = (self.zeros_gained or 0) + int(np.sum((values == 0) & (expected != 0)))

    def varies(self):
        """Returns whether runs of the same differ by more than rounding, and by about as much as from float32."""
        if self._squared_variation <= ROUNDING**2 * self._squares:
            return False
        return self._squared_variation * _LESS**2 >= self._squared_errors

    def relative_error(self):
        if self.zeros_gained is None or self.varies():
            return None
        if not np.isfinite(self._squared_errors):
            return np.inf
        if self._squares == 0.0:
            return 0.0 if self._squared_errors == 0.0 else np.inf
        return float(np.sqrt(self._squared_errors / self._squares))


def _squared_difference(values, others):
    with np.errstate(invalid="ignore"):
        squares = float(np.sum(np.square(values - others.astype(np.float64))))
    return squares if np.isfinite(squares) else np.inf
