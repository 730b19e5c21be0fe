"""Runs a network to look inside without changing it, and computes its loss and gradients."""

import contextlib
import os
import warnings

import mindspore
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale._mindspore import (
    around_transforms,
    forget_failed_calls,
    says_that_gradients_are_lost,
    write_in_place,
)
from ms_lossscale.diagnosis.cell_watch import WatchError
from ms_lossscale.function_network import name_of
from ms_lossscale.step.forward_backward import noticing_gradients
from ms_lossscale.step.held_call import StepBegunError, looking_into
from ms_lossscale.step.returned import loss_first
from ms_lossscale.step.scaling import scaled


@contextlib.contextmanager
def replay(owner, parts):
    """
    A context in which the networks of these parts run in PyNative mode, in training. It yields a :class:`LossAndGrads`
    for each part. Afterwards it restores parameters (also BatchNorm's statistics), buffers, whether each cell is in
    training, MindSpore's mode and its random state.

    Functions decorated with `mindspore.jit` also run in PyNative mode, so that the cells inside can be watched. A
    network that is in training already keeps the modes of the cells inside it.
    """
    networks = [part.network for part in parts]
    trains_in_graph_mode = mindspore.get_context("mode") == mindspore.GRAPH_MODE
    random_state = mindspore.get_rng_state()
    cells = {id(cell): cell for network in networks for _, cell in network.cells_and_names()}.values()
    in_training = [(cell, cell.training) for cell in cells]
    state = {id(s): s for network in networks for s in (*network.get_parameters(), *network.buffers())}.values()
    with _in_mode(mindspore.PYNATIVE_MODE, "0"), around_transforms(_compiling), looking_into():
        forget_failed_calls()
        values = [(each, ops.deepcopy(each)) for each in state if each is not None]

        def restore():
            write_in_place(values)

        try:
            for network in networks:
                if not network.training:
                    for _, cell in network.cells_and_names():
                        cell.add_flags(training=True)
            yield [LossAndGrads(owner, part, restore, trains_in_graph_mode) for part in parts]
        finally:
            restore()
            for cell, training in in_training:
                cell.add_flags(training=training)
            mindspore.set_rng_state(random_state)


@contextlib.contextmanager
def _in_mode(mode, ms_jit):
    mode_before = mindspore.get_context("mode")
    mindspore.set_context(mode=mode)
    try:
        with _compiling(ms_jit):
            yield
    finally:
        mindspore.set_context(mode=mode_before)


@contextlib.contextmanager
def _compiling(ms_jit="1"):
    """A context that sets whether functions decorated with `mindspore.jit` are compiled."""
    before, os.environ["MS_JIT"] = os.environ.get("MS_JIT"), ms_jit
    try:
        yield
    finally:
        if before is None:
            del os.environ["MS_JIT"]
        else:
            os.environ["MS_JIT"] = before


@contextlib.contextmanager
def running(owner, inputs):
    """A context that names the inputs on which a network failed, such as `batches[0]`."""
    try:
        yield
    except WatchError as error:
        raise RuntimeError(f"For '{owner}', {error}") from error
    except Exception as error:
        raise RuntimeError(
            f"For '{owner}', the network fails on {inputs} in PyNative mode, in which the diagnosis runs, before there "
            f"is anything to look at: {error}"
        ) from error


class LossAndGrads:
    """
    Computes the loss of a part and its gradients times a loss scale, within `replay`.

    PyNative mode loses the gradients of a gradient that the network takes in its forward (a gradient penalty). It
    notices such a network.

    Attributes:
        part (TrainedPart): The network and its weights.
        restore (Callable): Restores what forwards have written, of all parts.
        takes_gradient (bool): Whether the network took a gradient in a forward so far.
        compiles (bool): Whether graph mode could compute the network, as far as it was tried.
        only_in_graph (bool): Whether graph mode can compute the network, and PyNative mode can't.
    """

    def __init__(self, owner, part, restore, trains_in_graph_mode):
        self._owner = owner
        self.part = part
        self.restore = restore
        self.takes_gradient = False
        self._pynative = ops.value_and_grad(self._scaled_loss, None, ParameterTuple(part.weights), has_aux=True)
        self._graph = None
        self.compiles = True
        self.only_in_graph = False
        # Whether it is worth trying.
        self._may_be_only_in_graph = trains_in_graph_mode

    def go_on_from(self, earlier):
        """Takes over what an earlier one, of the same part, has learned of the network, and what it compiled."""
        self.takes_gradient, self.compiles = earlier.takes_gradient, earlier.compiles
        self.only_in_graph, self._graph = earlier.only_in_graph, earlier._graph
        self._may_be_only_in_graph = earlier._may_be_only_in_graph

    def _scaled_loss(self, scale, *inputs):
        with noticing_gradients(self._notice):
            loss = self.part.loss(*inputs)
        return scaled(loss, scale), loss

    def _notice(self, grads):
        self.takes_gradient = True
        return grads

    def in_pynative(self, loss_scale, batch):
        """Returns the loss and gradients of a batch in PyNative mode, whose cells can be watched."""
        inputs = self.part.inputs(batch)
        (_, loss), grads = self._pynative(Tensor(loss_scale, mstype.float32), *inputs)
        self._may_be_only_in_graph = False
        return loss, grads

    def in_graph_instead(self, error, loss_scale, batch):
        """
        Returns the loss and gradients in graph mode after PyNative mode failed with this error, for a network that is
        written only for graph mode. Raises the error if graph mode fails, too, or if its user is in PyNative mode.
        """
        if not self._may_be_only_in_graph or isinstance(error, StepBegunError):
            raise error
        self.restore()
        try:
            loss_and_grads = self.in_graph(loss_scale, batch)
        except Exception:
            raise error from None
        self.only_in_graph = True
        return loss_and_grads

    def correct(self, loss_scale, batch):
        """Returns the loss and gradients, from graph mode if the network takes a gradient and compiles there."""
        if self.only_in_graph:
            return self.in_graph(loss_scale, batch)
        if not (self.takes_gradient and self.compiles):
            try:
                loss_and_grads = self.in_pynative(loss_scale, batch)
            except Exception as error:
                return self.in_graph_instead(error, loss_scale, batch)
            if not (self.takes_gradient and self.compiles):
                return loss_and_grads
            self.restore()
        try:
            return self.in_graph(loss_scale, batch)
        except Exception as error:
            self.compiles = False
            self.restore()
            warnings.warn(
                f"{self._says_what()}, and the network could not be computed in graph mode, which keeps them: the "
                f"gradients that are reported lack them. Graph mode's error: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return self.in_pynative(loss_scale, batch)

    def in_graph(self, loss_scale, batch):
        """Returns the loss and gradients in graph mode, and passes on its errors."""
        inputs = self.part.inputs(batch)
        with _in_mode(mindspore.GRAPH_MODE, "1"):
            if self._graph is None:
                self._graph = _InGraph(self.part)
            return self._graph(Tensor(loss_scale, mstype.float32), *inputs)

    def warn(self, what, cure):
        """Warns of what is wrong because the network takes a gradient, if it does."""
        if self.takes_gradient:
            warnings.warn(f"{self._says_what()}: {what}. {cure}", RuntimeWarning, stacklevel=3)

    def _says_what(self):
        network = name_of(self.part.network)
        name = f"{self.part.prefix} ({network})" if self.part.prefix else f"'{network}'"
        return says_that_gradients_are_lost(self._owner, name)


class _InGraph(nn.Cell):
    """Computes loss and gradients; it must be constructed in graph mode."""

    def __init__(self, part):
        super().__init__(auto_prefix=False)
        self.network = part.network
        self._item, self._may_return_more = part.item, part.is_function
        self._name, self._number = name_of(part.network), part.number
        self._value_and_grad = ops.value_and_grad(self._scaled_loss, None, ParameterTuple(part.weights), has_aux=True)

    def _scaled_loss(self, scale, *inputs):
        loss = self.network(*inputs)
        if self._item is not None:
            loss = loss[self._item]
        elif self._may_return_more and isinstance(loss, tuple):
            loss = loss_first(self._name, self._number, loss)[0]
        return scaled(loss, scale), loss

    def construct(self, scale, *inputs):
        results, grads = self._value_and_grad(scale, *inputs)
        return results[1], grads
