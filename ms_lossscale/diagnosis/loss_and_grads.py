"""The loss of a network and its gradients, also where the network takes a gradient itself."""

import contextlib
import warnings

from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.composite.base import _pynative_executor

from ms_lossscale.diagnosis.replay import in_graph_mode
from ms_lossscale.step.scaling import scaled

# The methods, MindSpore 2.7 has both, that compute every gradient in PyNative mode, whichever function asks for it.
_GRADIENTS = [name for name in ("grad", "grad_aux") if hasattr(_pynative_executor, name)]


class LossAndGrads:
    """
    Computes the loss of a part and its gradients times a loss scale, within `replay`.

    PyNative mode loses the gradients of a gradient that the network takes in its forward (a gradient penalty): such a
    network is noticed.

    Args:
        owner (str): Who computes, for the warnings.
        part (TrainedPart): The network and its weights.
        restore (Callable): Puts what a forward has written back.

    Attributes:
        takes_gradient (bool): Whether the network took a gradient in a forward so far.
        compiles (bool): Whether graph mode, if it was asked so far, could compute the network.
    """

    def __init__(self, owner, part, restore):
        self._owner = owner
        self._part = part
        self._restore = restore
        self.takes_gradient = False
        self._pynative = ops.value_and_grad(self._scaled_loss, None, ParameterTuple(part.weights), has_aux=True)
        self._graph = None
        self.compiles = True

    def _scaled_loss(self, scale, *inputs):
        with self._noticing():
            loss = self._part.loss(*inputs)
        return scaled(loss, scale), loss

    @contextlib.contextmanager
    def _noticing(self):
        def noticed(compute):
            def notice(*args, **kwargs):
                self.takes_gradient = True
                return compute(*args, **kwargs)

            return notice

        try:
            for name in _GRADIENTS:
                setattr(_pynative_executor, name, noticed(getattr(_pynative_executor, name)))
            yield
        finally:
            # Set on the object, where they hid its class's.
            for name in _GRADIENTS:
                delattr(_pynative_executor, name)

    def in_pynative(self, loss_scale, inputs):
        """The loss and the gradients as PyNative mode computes them, whose cells can be watched."""
        (_, loss), grads = self._pynative(Tensor(loss_scale, mstype.float32), *inputs)
        return loss, grads

    def correct(self, loss_scale, inputs):
        """The loss and the gradients, of a network that takes a gradient in graph mode, if it compiles there."""
        if not (self.takes_gradient and self.compiles):
            loss_and_grads = self.in_pynative(loss_scale, inputs)
            if not (self.takes_gradient and self.compiles):
                return loss_and_grads
            self._restore()
        try:
            return self._in_graph(loss_scale, inputs)
        except Exception as error:
            self.compiles = False
            self._restore()
            warnings.warn(
                f"{self._says_what()}, and the network could not be computed in graph mode, which keeps them: the "
                f"gradients that are reported lack them. Graph mode's error: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return self.in_pynative(loss_scale, inputs)

    def _in_graph(self, loss_scale, inputs):
        with in_graph_mode():
            if self._graph is None:
                self._graph = _InGraph(self._part)
            return self._graph(Tensor(loss_scale, mstype.float32), *inputs)

    def warn(self, what, cure):
        """Warns, if the network takes a gradient, of what that spoils."""
        if self.takes_gradient:
            warnings.warn(f"{self._says_what()}: {what}. {cure}", RuntimeWarning, stacklevel=3)

    def _says_what(self):
        network = type(self._part.network).__name__
        name = f"{self._part.prefix} ({network})" if self._part.prefix else f"'{network}'"
        return (
            f"For '{self._owner}', {name} takes a gradient in its forward, and MindSpore's PyNative mode loses the "
            f"gradients of that gradient"
        )


class _InGraph(nn.Cell):
    """To be constructed in graph mode."""

    def __init__(self, part):
        super().__init__(auto_prefix=False)
        self.network = part.network
        self._item = part.item
        self._value_and_grad = ops.value_and_grad(self._scaled_loss, None, ParameterTuple(part.weights), has_aux=True)

    def _scaled_loss(self, scale, *inputs):
        loss = self.network(*inputs)
        if self._item is not None:
            loss = loss[self._item]
        return scaled(loss, scale), loss

    def construct(self, scale, *inputs):
        (_, loss), grads = self._value_and_grad(scale, *inputs)
        return loss, grads
