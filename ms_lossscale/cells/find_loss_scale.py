"""Finds the initial loss scale by trying a batch, without making a step."""

import functools

from mindspore import Tensor
from mindspore import dtype as mstype

from ms_lossscale._mindspore import write_in_place
from ms_lossscale._output import written_scale
from ms_lossscale._powers_of_two import last_that_holds, powers_of_two
from ms_lossscale._user_warnings import warn_user
from ms_lossscale._values import on_unreached
from ms_lossscale.cells.guard import explaining_errors

# The smallest loss scale there is.
_SMALLEST = 2.0**-126


def find_loss_scale(cell, inputs):
    """Finds and sets the loss scales of a training cell, see :meth:`TrainingCell.find_loss_scale`."""
    owner, loss_scales = type(cell).__name__, cell._loss_scales
    if all(its.min_loss_scale is None for its in loss_scales):
        raise RuntimeError(
            f"For '{owner}', 'find_loss_scale()' needs a loss scale that moves by itself, but got a "
            f"{type(loss_scales[0]).__name__}. Construct the cell with a DynamicLossScale, or set a scale with "
            f"set_loss_scale(value)."
        )
    if not inputs or any(each is None for each in inputs):
        raise TypeError(f"For '{owner}', 'find_loss_scale()' needs the inputs of a step, a batch, but got {inputs!r}.")
    cell._before_step(inputs)
    if not cell._trials:
        cell._trials.extend(step.make_trial() for step in cell.steps)
    before, reached = [(its, its.get_loss_scale()) for its in loss_scales], {}

    def overflowed(i, scales):
        _set_in_place(scales)
        cell._guard.put_back()
        with explaining_errors(cell):
            found, nonzero = cell._trials[i](*cell._inputs_of_step(i, inputs))
        for j, flag in enumerate(nonzero):
            reached[i, j] = reached.get((i, j), False) or bool(flag.asnumpy())
        cell._guard.after(lambda _: True)
        return found.asnumpy().reshape(-1)

    def largest_clean(i, j, loss_scales):
        its = loss_scales[j]
        powers = powers_of_two(its.min_loss_scale, its.max_loss_scale) or [its.min_loss_scale]
        # Of several, each is tried alone, the others at their floors: a register does not tell whose overflow it is.
        lowest = [(each, each.min_loss_scale or each.get_loss_scale()) for each in loss_scales]
        is_clean = functools.cache(lambda scale: not overflowed(i, [*lowest, (its, scale)])[j])
        # A gradient may also be too small, if something divides by one that became zero.
        found = last_that_holds(powers, is_clean) or next(filter(is_clean, reversed(powers)), None)
        if found is None:
            lower = last_that_holds(powers_of_two(_SMALLEST, powers[0] / 2), is_clean)
            of_network = f" of network {max(i, j)}" if cell.each_has_scale else ""
            raise RuntimeError(
                f"For '{owner}', 'find_loss_scale()' found no loss scale{of_network}: this batch overflows at every "
                f"power of two from {written_scale(powers[0])} to {written_scale(powers[-1])}. "
                f"{_cure(lower, powers[0])}"
            )
        return max(found / 2, its.min_loss_scale)

    try:
        found = []
        for i, step in enumerate(cell.steps):
            its = list(step.transaction.loss_scales)
            found += [
                each.get_loss_scale() if each.min_loss_scale is None else largest_clean(i, j, its)
                for j, each in enumerate(its)
            ]
    finally:
        _set_in_place(before)
    unreached = [
        max(where) if cell.several_networks else None for where, any_nonzero in reached.items() if not any_nonzero
    ]
    if unreached:
        warn_user(f"For '{owner}', 'find_loss_scale()': {on_unreached(unreached)}")
    found = cell._of_loss_scales(found)
    cell.set_loss_scale(found)
    return found


def _cure(lower, floor):
    if lower:
        return (
            f"At {written_scale(lower)} it does not: let the scale fall further, "
            f"DynamicLossScale(..., min_loss_scale={written_scale(max(lower / 16, _SMALLEST))})."
        )
    return (
        f"Look for NaN in the data and the weights; ms_lossscale.locate_overflow(cell, inputs, "
        f"loss_scale={written_scale(floor)}) names where it begins."
    )


def _set_in_place(scales):
    """Sets scales temporarily, without telling accumulation cycles."""
    write_in_place([(loss_scale.scale_value, Tensor(value, mstype.float32)) for loss_scale, value in scales])
