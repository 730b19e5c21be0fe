"""What a ManualStep differentiates."""

import weakref

from mindspore import nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._mindspore.graphs import is_compiling
from ms_lossscale.cells.call_checks import holds_any
from ms_lossscale.step.returned import ReturnedValues

_value_and_grads: "weakref.WeakSet[ScaledValueAndGrad]" = weakref.WeakSet()


def forget_compiled_gradients(cells):
    """Makes graph mode compile anew what Python calls for the gradients of a ManualStep on one of these cells."""
    for value_and_grad in _value_and_grads:
        if holds_any(value_and_grad.manual_step.networks, cells):
            value_and_grad.compile_anew()


class ScaledValueAndGrad(nn.Cell):
    """Computes the loss of a function and its scaled gradients by the weights of one optimizer."""

    def __init__(self, manual_step, function, weights, number, has_aux):
        super().__init__(auto_prefix=False)
        owner = f"{type(manual_step).__name__}.value_and_grad"
        self._number = number
        self._has_aux = has_aux
        # Hidden from MindSpore: their Cells belong to the step.
        object.__setattr__(self, "manual_step", manual_step)
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "_weights", weights)
        self._returned_values = ReturnedValues(
            owner, number, has_aux=has_aux, may_be_tuple=has_aux, note=manual_step._checks.note_loss
        )
        checks = manual_step._checks
        # Graph mode runs these each time that it comes to them.
        self._begin = ops.constexpr(checks.begin_derivative, reuse_result=False)
        self._end = ops.constexpr(checks.end_derivative, reuse_result=False)
        self.compile_anew()
        _value_and_grads.add(self)

    def compile_anew(self):
        """Forgets what graph mode has compiled for Python."""
        self._differentiate = ops.value_and_grad(self._scaled_loss, None, self._weights, has_aux=True)

    def _scaled_loss(self, scale, *inputs, **keywords):
        values = self._returned_values(self.function(*inputs, **keywords))
        loss = self._returned_values.look_at(values[0])
        # After the function, since of its loss.
        loss = loss if self._end(self._number, loss.dtype) else ()
        return gradients.scaled(loss, scale), prim.deepcopy(loss), values[1:]

    def construct(self, *inputs, **keywords):
        scale = self.manual_step._scale_of_call(self._begin(self._number))
        if is_compiling():
            scale = ops.depend(scale, self.manual_step._calls.transaction.watch.note_derivative())
        results, grads = self._differentiate(scale, *inputs, **keywords)
        if self._has_aux:
            return ((results[1],) + results[2], grads)
        return results[1], grads

    # Python runs it as it is, also in graph mode.
    def __call__(self, *inputs, **keywords):
        self.manual_step._check_begun("value_and_grad")
        return self.construct(*inputs, **keywords)
