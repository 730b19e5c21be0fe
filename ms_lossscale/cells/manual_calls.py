"""What a ManualStep differentiates, and what it checks, eagerly and in compiled code."""

import weakref

from mindspore import dtype as mstype
from mindspore import nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._output import warn_user
from ms_lossscale.cells.rank_comparison import refuse_with_sharded_weights
from ms_lossscale.loss_scale import FixedLossScale
from ms_lossscale.step.returned import ReturnedValues

_compiled: "weakref.WeakSet[CallChecks]" = weakref.WeakSet()


def are_compiled(cells):
    """Returns whether the user's code has compiled a ManualStep on one of these cells."""
    ids = set(map(id, cells))
    networks = [network for checks in _compiled for network in checks.networks]
    return any(id(cell) in ids for network in networks for _, cell in network.cells_and_names())


class CallChecks:
    """
    Checks what a ManualStep is called with; graph mode runs these methods when it compiles. It warns once if an `end`
    comes before any loss was scaled.
    """

    def __init__(self, plan, parallel_mode):
        self._owner, self._parallel_mode = plan.owner, parallel_mode
        self.networks = plan.networks
        self._shapes = tuple(tuple(tuple(weight.shape) for weight in weights) for weights in plan.weights)
        self._loss_scales, self._scale_of = list(plan.loss_scales), plan.scale_of_network
        self._needs_loss = any(condition.needs_loss for condition in plan.settings.skip_conditions) or not all(
            loss_scale.backoff_if_loss_not_finite for loss_scale in plan.loss_scales
        )
        self._not_yet_used = {
            i
            for i, loss_scale in enumerate(plan.loss_scales)
            if type(loss_scale) is not FixedLossScale or loss_scale.get_loss_scale() != 1
        }

    def optimizer_number(self, number):
        """Raises unless this is the number of an optimizer."""
        if not isinstance(number, int) or not 0 <= number < len(self._shapes):
            raise ValueError(
                f"For '{self._owner}', the number of an optimizer must be from 0 to {len(self._shapes) - 1}, but got "
                f"{number!r}."
            )

    def used_scale(self, number):
        """Remembers that a loss was scaled for this optimizer. Returns the number of its scale."""
        self.optimizer_number(number)
        self._not_yet_used.discard(self._scale_of[number])
        return self._scale_of[number]

    def end(self, shapes, dtypes, misses_loss, has_weight):
        """Raises unless there is a gradient of its shape for each weight. Compiled code may not know a length."""
        owner = f"{self._owner}.end"
        fit = len(shapes) == len(self._shapes) and all(
            len(its) == len(own)
            and all(isinstance(a, tuple) and (a == b or any(length < 0 for length in a)) for a, b in zip(its, own))
            for its, own in zip(shapes, self._shapes)
        )
        if not fit:
            raise ValueError(
                f"For '{owner}', there must be a tuple of gradients for each of the {len(self._shapes)} "
                f"optimizers, in the order of its 'parameters': end(grads) for one, end(grads_0, grads_1) for two. "
                f"Their shapes are {self._shapes}, but got {shapes}."
            )
        if any(each in (mstype.complex64, mstype.complex128) for its in dtypes for each in its):
            raise TypeError(
                f"For '{owner}', gradients must be real, but got complex ones, whose imaginary part would be "
                f"lost. Train the real and the imaginary part of such a weight as two Parameters."
            )
        if misses_loss and self._needs_loss:
            raise ValueError(
                f"For '{owner}', the argument 'loss' must be given, since 'skip_conditions' or "
                f"'backoff_if_loss_not_finite=False' look at it: end(grads, loss=loss)."
            )
        if has_weight:
            refuse_with_sharded_weights(owner, "weight", self._parallel_mode)
        self._warn_of_unused_scales()
        return True

    def compiled_end(self, *args):
        """Does the same, and remembers that it is compiled."""
        _compiled.add(self)
        return self.end(*args)

    def _warn_of_unused_scales(self):
        if any(not self._loss_scales[i].has_scaled for i in self._not_yet_used):
            warn_user(
                f"For '{self._owner}', no loss has gone through 'value_and_grad' or 'scale' before the first 'end', "
                f"which divides the gradients by the loss scale all the same. Differentiate with "
                f"step.value_and_grad(forward), with several loss scales step.value_and_grad(forward, number)."
            )
        self._not_yet_used.clear()


class ScaledValueAndGrad(nn.Cell):
    """Computes the loss of a function and its scaled gradients by the weights of one optimizer."""

    def __init__(self, manual_step, function, weights, number, has_aux):
        super().__init__(auto_prefix=False)
        self._owner = f"{type(manual_step).__name__}.value_and_grad"
        self._number, self._has_aux = number, has_aux
        # Hidden from MindSpore: their Cells belong to the step.
        object.__setattr__(self, "manual_step", manual_step)
        object.__setattr__(self, "function", function)
        self._returned_values = ReturnedValues(self._owner, number, has_aux=has_aux, may_be_tuple=has_aux)
        self._differentiate = ops.value_and_grad(self._scaled_loss, None, weights, has_aux=True)

    def _scaled_loss(self, scale, *inputs):
        values = self._returned_values(self.function(*inputs))
        return gradients.scaled(values[0], scale), prim.deepcopy(values[0]), values[1:]

    def construct(self, *inputs):
        scale = self.manual_step.scale_of_call(self._number)
        results, grads = self._differentiate(scale, *inputs)
        if self._has_aux:
            return ((results[1],) + results[2], grads)
        return results[1], grads

    # Python runs it as it is, also in graph mode.
    def __call__(self, *inputs):
        return self.construct(*inputs)
