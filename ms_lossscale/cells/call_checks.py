"""What a ManualStep checks, eagerly and in compiled code."""

import numbers
import weakref

from mindspore import Tensor, ops
from mindspore import dtype as mstype

from ms_lossscale._arguments import describe
from ms_lossscale._mindspore.graphs import loads_what_was_compiled
from ms_lossscale._mindspore.parameters import take_held_gradients
from ms_lossscale._warn_user import warn_user
from ms_lossscale.cells.rank_comparison import refuse_with_sharded_weights
from ms_lossscale.loss_scale import FixedLossScale

# What a ManualStep has in the place of arguments of the training cells.
ANSWERS = {
    "max_retries": "Your loop runs a batch again while 'end' returns True, see docs/own_steps.md.",
    "has_aux": "It is one of step.value_and_grad(forward, has_aux=True).",
    "weighted": "Pass the weight to the end of each call: step.end(grads, weight=weight).",
    "network_inputs": "Your forward passes each network what it takes.",
}
# How many calls in a row that began and never ended are told.
_TOLD_CALLS = 10
_compiled: "weakref.WeakSet[CallChecks]" = weakref.WeakSet()


def are_compiled(cells):
    """Returns whether the user's code has compiled a ManualStep on one of these cells."""
    return any(holds_any(checks.networks, cells) for checks in _compiled)


def holds_any(networks, cells):
    """Returns whether one of these cells is, or is in, one of the networks."""
    ids = set(map(id, cells))
    return any(id(cell) in ids for network in networks for _, cell in network.cells_and_names())


def check_no_compile_cache(owner):
    """Raises if MindSpore would load compiled functions instead of compiling them."""
    if loads_what_was_compiled():
        raise RuntimeError(
            f"For '{owner}', MindSpore's compile cache must be off: a function that is loaded from it has not the "
            f"weights and the loss scale of the present process. Unset MS_COMPILER_CACHE_ENABLE, or call "
            f"mindspore.set_context(enable_compile_cache=False). The training cells work with it."
        )


def held_gradients(owner, weights_of_optimizers):
    """Takes from the weights the gradients that a `.backward()` has left in them; zeros from those without."""
    held = [take_held_gradients(weights) for weights in weights_of_optimizers]
    if all(grad is None for grads in held for grad in grads):
        raise RuntimeError(
            f"For '{owner}', 'end()' without gradients takes those that a backward() has left in the weights, but "
            f"there are none. Pass the gradients: end(grads)."
        )
    return [list(map(_grad_or_zeros, grads, weights)) for grads, weights in zip(held, weights_of_optimizers)]


def _grad_or_zeros(grad, weight):
    return ops.zeros_like(weight) if grad is None else grad


class CallChecks:
    """
    Checks what a ManualStep is called with, and in which order; graph mode runs these methods when it compiles. It
    warns once if an `end` comes before any loss was scaled, and if many calls begin and never end.

    Attributes:
        has_begun (bool): Whether Python has begun a call that Python has not ended.
        is_weighted (bool): Whether the calls that Python ends have a weight; None before the first.
    """

    def __init__(self, plan, parallel_mode):
        self._owner = plan.owner
        self._parallel_mode = parallel_mode
        self.networks = plan.networks
        self._shapes = tuple(tuple(tuple(weight.shape) for weight in weights) for weights in plan.weights)
        self._loss_scales = list(plan.loss_scales)
        self._scale_of = plan.scale_of_network
        self._needs_loss = any(condition.needs_loss for condition in plan.settings.skip_conditions) or not all(
            loss_scale.backoff_if_loss_not_finite for loss_scale in plan.loss_scales
        )
        self._not_yet_used = {
            i
            for i, loss_scale in enumerate(plan.loss_scales)
            if type(loss_scale) is not FixedLossScale or loss_scale.get_loss_scale() != 1
        }
        self.has_begun = False
        self.is_weighted = None
        self._has_ever_begun = False
        self._is_begin_compiled = False
        self._given_up = 0
        self._of_losses = None
        # Whether `scale` was called within the derivative that is being computed; None outside of one.
        self._scaled_within = None

    def begin(self):
        """Notes that Python begins a call."""
        self._has_ever_begun = True
        self.has_begun = True

    def compiled_begin(self):
        """Notes that code is compiled that begins calls."""
        self._has_ever_begun = True
        self._is_begin_compiled = True

    @property
    def may_be_open(self):
        """Whether a call may have begun and not ended."""
        return self.has_begun or self._is_begin_compiled

    def give_up(self, is_open):
        """Notes that a call of Python began and did not end in Python. `is_open()`: nor did it in compiled code."""
        self._given_up += 1
        if self._given_up == _TOLD_CALLS:
            if is_open():
                warn_user(
                    f"For '{self._owner}', the last {_TOLD_CALLS} steps began and never ended: each 'begin' restores "
                    f"what the forward of the one before wrote, and no weight changes. Call end(grads) in each step."
                )
            else:
                self._given_up = 0

    def end(self):
        """Notes that Python ends a call."""
        self.has_begun = False
        if self._given_up < _TOLD_CALLS:  # It is told once.
            self._given_up = 0

    def check_begun(self, owner, has_begun):
        """Raises unless a step has begun."""
        if not has_begun:
            raise RuntimeError(
                f"For '{owner}', no step has begun. Call begin(*inputs) in each step, and run the forward on what it "
                f"returns, before end(grads)."
            )

    def optimizer_number(self, number):
        """Raises unless this is the number of an optimizer. Returns it as an int."""
        if not isinstance(number, numbers.Integral) or not 0 <= number < len(self._shapes):
            raise ValueError(
                f"For '{self._owner}', the number of an optimizer must be from 0 to {len(self._shapes) - 1}, but got "
                f"{number!r}."
            )
        return int(number)

    def used_scale(self, number):
        """Remembers that a loss was scaled for this optimizer. Returns the number of its scale."""
        scale = self._scale_of[self.optimizer_number(number)]
        self._not_yet_used.discard(scale)
        return scale

    def scaled(self, number):
        """The same where the user's code scales the loss."""
        self._scaled_within = None if self._scaled_within is None else True
        return self.used_scale(number)

    def begin_derivative(self, number):
        """The same where a derivative is computed, whose function must not scale the loss."""
        self._scaled_within = False
        return self.used_scale(number)

    def end_derivative(self, number, _):
        """Raises if the function of the derivative that has begun for this optimizer has scaled its loss."""
        was_scaled, self._scaled_within = self._scaled_within, None
        if was_scaled:
            raise RuntimeError(
                f"For '{self._owner}.value_and_grad', the function of optimizer {number} calls 'scale', so that its "
                f"loss is scaled twice, and each update is as many times too long as the loss scale. Return the loss "
                f"as it is, or differentiate by mindspore.value_and_grad."
            )
        return True

    def note_loss(self, warning):
        """Remembers a warning of a loss, which is given at the next `end` that has no weight."""
        self._of_losses = warning

    def gradients_and_loss(self, grads, loss, weight):
        """Raises unless Python ends a call with tuples of gradients that fit, and a loss and a weight that may be."""
        owner = f"{self._owner}.end"
        if loss is not None and not isinstance(loss, Tensor):
            raise TypeError(f"For '{owner}', the argument 'loss' must be a Tensor, but got {describe(loss)}.")
        for i, of_optimizer in enumerate(grads):
            if not isinstance(of_optimizer, (tuple, list)) or not all(isinstance(g, Tensor) for g in of_optimizer):
                raise TypeError(
                    f"For '{owner}', the gradients of optimizer {i} must be a tuple of Tensors, one for each "
                    f"weight, but got {describe(of_optimizer)}."
                )
        shapes = tuple(tuple(tuple(grad.shape) for grad in of_optimizer) for of_optimizer in grads)
        dtypes = tuple(tuple(grad.dtype for grad in of_optimizer) for of_optimizer in grads)
        self.forms(shapes, dtypes, loss is None, weight is not None)

    def weighted(self, is_weighted, cycle):
        """Raises if some calls that Python ends have a weight, and others none. `cycle` is None without a cycle."""
        if self.is_weighted is None:
            has_begun = cycle is not None and cycle.count.has_begun()
            self.is_weighted = bool(cycle.is_weighted.asnumpy()) if has_begun else is_weighted
        if self.is_weighted != is_weighted:
            raise ValueError(f"For '{self._owner}.end', either all calls must have a 'weight', or none.")

    def compiled(self):
        """Remembers, at compilation, that the user's code has compiled a part of the step."""
        _compiled.add(self)

    def compiled_end(self, shapes, dtypes, misses_loss, has_weight):
        """
        Raises, at compilation, unless a step can have begun, and its end is called with what fits. Remembers that it is
        compiled.
        """
        self.compiled()
        self.check_begun(f"{self._owner}.end", self._has_ever_begun)
        return self.forms(shapes, dtypes, misses_loss, has_weight)

    def forms(self, shapes, dtypes, misses_loss, has_weight):
        """Raises unless there is a gradient of its shape for each weight. Compiled code may not know a length."""
        owner = f"{self._owner}.end"
        if not _fit(shapes, self._shapes):
            raise ValueError(
                f"For '{owner}', there must be a tuple of gradients for each of the {len(self._shapes)} "
                f"optimizers, in the order of its 'parameters': end(grads) for one, end(grads_0, grads_1) for two. "
                f"Their shapes are {self._shapes}, but got {shapes}."
            )
        if any(dtype in (mstype.complex64, mstype.complex128) for of_optimizer in dtypes for dtype in of_optimizer):
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
        if self._of_losses is not None and not has_weight:
            warn_user(self._of_losses)
        self._of_losses = None
        return True

    def _warn_of_unused_scales(self):
        if any(not self._loss_scales[i]._has_scaled for i in self._not_yet_used):
            warn_user(
                f"For '{self._owner}', no loss has gone through 'value_and_grad' or 'scale' before the first 'end', "
                f"which divides the gradients by the loss scale all the same. Differentiate with "
                f"step.value_and_grad(forward), with several loss scales step.value_and_grad(forward, number)."
            )
        self._not_yet_used.clear()


def _fit(shapes, of_weights):
    return len(shapes) == len(of_weights) and all(map(_fit_optimizer, shapes, of_weights))


def _fit_optimizer(shapes, of_weights):
    return len(shapes) == len(of_weights) and all(map(_fits, shapes, of_weights))


def _fits(shape, of_weight):
    # Of what is no Tensor, the shape is a word.
    return shape == of_weight or (isinstance(shape, tuple) and any(length < 0 for length in shape))
