"""Runs a network to look inside without changing it, and computes its loss and gradients."""

import contextlib
import functools
import os

import mindspore
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale._mindspore import around_transforms, forget_failed_calls, write_in_place
from ms_lossscale._user_warnings import warn_user
from ms_lossscale.diagnosis.noticing_gradients import noticing_gradients
from ms_lossscale.function_network import FunctionNetwork, name_of
from ms_lossscale.step.returned import loss_first


@contextlib.contextmanager
def replay(owner, parts, mode=mindspore.PYNATIVE_MODE):
    """
    A context in which the networks of these parts run in this mode, in training. It yields a :class:`LossAndGrads` for
    each part. Afterwards it restores parameters (also BatchNorm's statistics), buffers, whether each cell is in
    training, MindSpore's mode and its random state.

    A network that is in training already keeps the modes of the cells inside it.
    """
    networks = [part.network for part in parts]
    cells = {id(cell): cell for network in networks for _, cell in network.cells_and_names()}.values()
    state = {id(s): s for network in networks for s in (*network.get_parameters(), *network.buffers())}.values()
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(mindspore.set_context, mode=mindspore.get_context("mode"))
        mindspore.set_context(mode=mode)
        if mode == mindspore.PYNATIVE_MODE:
            # Functions decorated with `mindspore.jit` then run as they are, so that the cells inside can be watched.
            afterwards.enter_context(_compiling("0"))
            afterwards.enter_context(around_transforms(_compiling))
        forget_failed_calls()
        afterwards.callback(mindspore.set_rng_state, mindspore.get_rng_state())
        values = [(each, ops.deepcopy(each)) for each in state if each is not None]
        restore = functools.partial(write_in_place, values)
        for cell in cells:
            afterwards.callback(cell.add_flags, training=cell.training)
        afterwards.callback(restore)
        for cell in (its for network in networks if not network.training for _, its in network.cells_and_names()):
            cell.add_flags(training=True)
        each_loss_and_grads = [LossAndGrads(part, restore) for part in parts]
        yield each_loss_and_grads
    for name in dict.fromkeys(each.name for each in each_loss_and_grads if each.takes_gradient):
        warn_user(
            f"For '{owner}', '{name}' takes a gradient in its forward, and MindSpore's PyNative mode loses the "
            f"gradients of that gradient: what flows back is reported without them. Graph mode keeps them, and "
            f"profile_gradients runs in it if it is set."
        )


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
    except Exception as error:
        forget_failed_calls()
        hint = (
            "\nIt was run in PyNative mode. A network that runs in graph mode only can't be looked into; in graph "
            "mode, profile_gradients counts its gradients."
        )
        message = f"For '{owner}', the network fails on {inputs}, before there is anything to look at: {error}"
        in_pynative = mindspore.get_context("mode") == mindspore.PYNATIVE_MODE
        raise RuntimeError(message + (hint if in_pynative else "")) from error


class LossAndGrads(nn.Cell):
    """
    Computes the loss of a part and its gradients times a loss scale, within `replay`.

    Attributes:
        part (TrainedPart): The network and its weights.
        restore (Callable): Restores what forwards have written, of all parts.
        takes_gradient (bool): Whether the network took a gradient in a forward in PyNative mode.
    """

    def __init__(self, part, restore):
        super().__init__(auto_prefix=False)
        # Hidden from MindSpore.
        object.__setattr__(self, "part", part)
        self.restore, self.takes_gradient = restore, False
        self.network, self.name = part.network, name_of(part.network)
        self._number, self._item = part.number, part.item
        # As for `value_and_grad`, a function may return more after its loss.
        self._may_return_more = isinstance(part.network, FunctionNetwork)
        self._value_and_grad = ops.value_and_grad(self._scaled_loss, None, ParameterTuple(part.weights), has_aux=True)

    def of(self, loss_scale, batch):
        """Returns the loss and the gradients of a batch."""

        def notice(grads):
            self.takes_gradient = True
            return grads

        with noticing_gradients(notice):
            return self(Tensor(loss_scale, mstype.float32), *self.part.inputs(batch))

    def _scaled_loss(self, scale, *inputs):
        loss = self.network(*inputs)
        if self._item is not None:
            loss = loss[self._item]
        elif self._may_return_more and isinstance(loss, tuple):
            loss = loss_first(self.name, self._number, loss)[0]
        if not isinstance(loss, Tensor):
            raise TypeError("It must return a Tensor, the loss: wrap it in a Cell or function that does.")
        # A float16 loss times the scale may be infinite.
        return loss.astype(mstype.float32) * scale, loss

    def construct(self, scale, *inputs):
        results, grads = self._value_and_grad(scale, *inputs)
        return results[1], grads
