"""What a user's code calls of a ManualStep, eagerly and in compiled code."""

import weakref

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._arguments import describe
from ms_lossscale._gradients import of_network
from ms_lossscale._output import warn_user
from ms_lossscale.cells.rank_comparison import refuse_with_sharded_weights
from ms_lossscale.loss_scale import FixedLossScale
from ms_lossscale.step.returned import as_weight, returned_values


class _Part(nn.Cell):
    """A part of a call. Compiled code knows only `construct`; `__call__` does more."""

    def __init__(self, manual_step, part):
        super().__init__(auto_prefix=False)
        self.part = part
        # Hidden from MindSpore, and no reference that would keep the step itself alive.
        object.__setattr__(self, "_reference", weakref.ref(manual_step))

    @property
    def manual_step(self):
        """The ManualStep that this is a part of."""
        step = self._reference()
        if step is None:
            raise RuntimeError(
                "For 'ManualStep', a part of it was called after the step itself was freed. Keep a reference to the "
                "step, and not only to its begin, end or value_and_grad."
            )
        return step


class Begin(_Part):
    """Begins a call of a :class:`ManualStep`, see there."""

    def __call__(self, *inputs):
        self.manual_step._begin_call()
        return inputs[0] if len(inputs) == 1 else inputs

    def construct(self, *inputs):
        inputs = self.part(*inputs)
        return inputs[0] if len(inputs) == 1 else inputs


class ScaleOfCall(_Part):
    """
    Returns the loss scale of an optimizer between `begin` and `end`. It warns once if an `end` comes before any loss
    was scaled.
    """

    def __init__(self, manual_step, calls):
        super().__init__(manual_step, None)
        self.held = calls.held
        self._owner, self._optimizers = type(manual_step).__name__, len(manual_step._weights_of_each)
        self._scales = list(manual_step._loss_scales)
        unscaled = (
            i for i, its in enumerate(self._scales) if type(its) is not FixedLossScale or its.get_loss_scale() != 1
        )
        self._missing = set(unscaled)
        # Known when it is compiled.
        self._note = ops.constexpr(self.note)

    def check_number(self, number):
        """Raises unless this is the number of an optimizer."""
        if not isinstance(number, int) or not 0 <= number < self._optimizers:
            raise ValueError(
                f"For '{self._owner}', the number of an optimizer must be from 0 to {self._optimizers - 1}, but got "
                f"{number!r}."
            )

    def note(self, number):
        """Remembers that a loss was scaled for this optimizer. Returns the number of its scale."""
        self.check_number(number)
        number = number if self.held.scale.ndim else 0
        self._missing.discard(number)
        return number

    def warn(self):
        """Warns if `end` is called before a loss was scaled."""
        if any(not self._scales[i].has_scaled for i in self._missing):
            warn_user(
                f"For '{self._owner}', no loss has gone through 'value_and_grad' or 'scale' before the first 'end', "
                f"which divides the gradients by the loss scale all the same. Differentiate with "
                f"step.value_and_grad(forward), with several loss scales step.value_and_grad(forward, number)."
            )
        self._missing.clear()
        return True

    def __call__(self, number):
        self.manual_step._check_begun(f"{self._owner}.scale")
        return of_network(self.note(number), self.held.scale)

    def construct(self, number):
        return of_network(self._note(number), prim.deepcopy(self.held.scale))


class ScaledValueAndGrad(_Part):
    """Computes the loss of a function and its scaled gradients by the weights of one optimizer."""

    def __init__(self, manual_step, scale_of_call, function, number, has_aux):
        super().__init__(manual_step, scale_of_call)
        self._owner, self._number, self._has_aux = f"{type(manual_step).__name__}.value_and_grad", number, has_aux
        # Hidden from MindSpore: its Cells belong to the step's networks.
        object.__setattr__(self, "function", function)
        weights = manual_step._weights_of_each[number]
        self._differentiate = ops.value_and_grad(self._scaled_loss, None, weights, has_aux=True)

    def _scaled_loss(self, scale, *inputs):
        output = self.function(*inputs)
        values = returned_values(self._owner, self._number, output, 1, self._has_aux, self._has_aux, False)
        return gradients.scaled(values[0], scale), prim.deepcopy(values[0]), values[1:]

    def _returned(self, results, grads):
        if self._has_aux:
            return ((results[1],) + results[2], grads)
        return results[1], grads

    def __call__(self, *inputs):
        results, grads = self._differentiate(gradients.copy((self.part(self._number),))[0], *inputs)
        return self._returned(results, grads)

    def construct(self, *inputs):
        results, grads = self._differentiate(self.part(self._number), *inputs)
        return self._returned(results, grads)


class End(_Part):
    """Ends a call of a :class:`ManualStep`, see there."""

    def __init__(self, manual_step, calls, settings, scale_of_call):
        super().__init__(manual_step, calls.end)
        self.owner = f"{type(manual_step).__name__}.end"
        self._shapes = tuple(tuple(tuple(its.shape) for its in each) for each in manual_step._weights_of_each)
        self._needs_loss = any(each.needs_loss for each in settings.skip_conditions) or not all(
            its.backoff_if_loss_not_finite for its in manual_step._loss_scales
        )
        self._parallel_mode, self._warn = manual_step.parallel_mode, scale_of_call.warn
        self._check = ops.constexpr(self.check)

    def check(self, shapes, dtypes, misses_loss, has_weight):
        """Raises unless there is a gradient of its shape for each weight. Compiled code may not know a length."""
        fit = len(shapes) == len(self._shapes) and all(
            len(its) == len(own)
            and all(isinstance(a, tuple) and (a == b or any(length < 0 for length in a)) for a, b in zip(its, own))
            for its, own in zip(shapes, self._shapes)
        )
        if not fit:
            raise ValueError(
                f"For '{self.owner}', there must be a tuple of gradients for each of the {len(self._shapes)} "
                f"optimizers, in the order of its 'parameters': end(grads) for one, end(grads_0, grads_1) for two. "
                f"Their shapes are {self._shapes}, but got {shapes}."
            )
        if any(each in (mstype.complex64, mstype.complex128) for its in dtypes for each in its):
            raise TypeError(
                f"For '{self.owner}', gradients must be real, but got complex ones, whose imaginary part would be "
                f"lost. Train the real and the imaginary part of such a weight as two Parameters."
            )
        if misses_loss and self._needs_loss:
            raise ValueError(
                f"For '{self.owner}', the argument 'loss' must be given, since 'skip_conditions' or "
                f"'backoff_if_loss_not_finite=False' look at it: end(grads, loss=loss)."
            )
        if has_weight:
            refuse_with_sharded_weights(self.owner, "weight", self._parallel_mode)
        return self._warn()

    def __call__(self, *grads, loss=None, weight=None):
        if loss is not None and not isinstance(loss, Tensor):
            raise TypeError(f"For '{self.owner}', the argument 'loss' must be a Tensor, but got {describe(loss)}.")
        step = self.manual_step
        step._check_begun(self.owner)
        grads = grads or step._held_by_weights()
        for i, its in enumerate(grads):
            if not isinstance(its, (tuple, list)) or not all(isinstance(each, Tensor) for each in its):
                raise TypeError(
                    f"For '{self.owner}', the gradients of optimizer {i} must be a tuple of Tensors, one for each "
                    f"weight, but got {describe(its)}."
                )
        shapes = tuple(tuple(tuple(g.shape) for g in its) for its in grads)
        self.check(shapes, [[g.dtype for g in its] for its in grads], loss is None, weight is not None)
        losses = () if loss is None else (loss,)
        weights = () if weight is None else (as_weight(self.owner, weight),)
        return step._end_call(tuple(grad for its in grads for grad in its), losses, weights)

    def construct(self, *grads, loss=None, weight=None):
        shapes, dtypes, flat = gradients.forms(grads), gradients.dtypes(grads), ()
        for its in grads if self._check(shapes, dtypes, loss is None, weight is not None) else ():
            flat += its
        losses = () if loss is None else (loss,)
        weights = () if weight is None else (as_weight(self.owner, weight),)
        return self.part(flat, losses, weights)
