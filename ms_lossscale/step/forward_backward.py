"""The scaled forward and backward of the networks of a step, and which of its inputs each network takes."""

import contextlib
import numbers
from collections.abc import Iterator
from typing import Any, Callable, Optional

from mindspore import GRAPH_MODE, Tensor, get_context, jit, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.composite.base import _pynative_executor

from ms_lossscale import _gradients as gradients
from ms_lossscale._arguments import describe
from ms_lossscale._gradients import of_network
from ms_lossscale._memory_in_use import MemoryInUse
from ms_lossscale._mindspore import backward_of_shared_forward
from ms_lossscale._signatures import takes
from ms_lossscale.function_network import name_of
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.packing import Packing
from ms_lossscale.step.returned import (
    check_losses,
    form_of,
    in_form,
    leaves_in,
    loss_and_aux_of,
    loss_first,
    loss_of,
    mean_of,
    of_each_tensor,
    tensors_in,
    without_weight,
)
from ms_lossscale.step.scaling import scaled

# The methods that compute every gradient in PyNative mode, whichever function asks for it. MindSpore 2.7 has both.
_GRADIENTS = [name for name in ("grad", "grad_aux") if hasattr(_pynative_executor, name)]


@contextlib.contextmanager
def noticing_gradients(notice: Callable[[Any], Any]) -> Iterator[None]:
    """
    A context that calls `notice` whenever PyNative mode has computed a gradient, within a function that it is going to
    differentiate. Nothing public shows this. What `notice` returns takes the gradient's place.
    """

    def noticed(compute):
        def compute_and_notice(*args, **kwargs):
            grads = compute(*args, **kwargs)
            return notice(grads) if _pynative_executor.requires_grad() else grads

        return compute_and_notice

    # Set on the object, they hide the methods of its class.
    outer = dict(vars(_pynative_executor))
    try:
        for name in _GRADIENTS:
            setattr(_pynative_executor, name, noticed(getattr(_pynative_executor, name)))
        yield
    finally:
        for name in _GRADIENTS:
            delattr(_pynative_executor, name)
        vars(_pynative_executor).update((name, outer[name]) for name in _GRADIENTS if name in outer)


def _copy(aux):
    """Copies aux: a network may return a Parameter or a view of one, and what the user gets must not change with it."""
    return in_form(form_of(aux), of_each_tensor(gradients.copy, leaves_in(aux)))


@ops.constexpr
def _fits(owner, network, written, least, most, count):
    if not least <= count <= most:
        raise TypeError(
            f"For '{owner}', '{network}' takes {written}, but within another Cell it gets {count}. If that "
            f"is Model's, pass Model(cell) without loss_fn, since the network returns the loss."
        )
    return True


class ChecksCount(nn.Cell):
    """
    In graph mode, checks the number of inputs when it is compiled, for a training cell that is part of another Cell: a
    call of the training cell itself is checked before.
    """

    @property
    def _fitting(self):
        # Graph mode reads properties when it compiles.
        its = takes(self.network) if get_context("mode") == GRAPH_MODE else None
        if its is None or its.any_number or its.by_keyword:
            return None
        return name_of(self.network), its.written(), its.required, len(its.names)

    def _fitting_inputs(self, inputs):
        """Returns the inputs. What checks them has a result, since graph mode warns of a call that has none."""
        fitting = self._fitting
        return inputs if fitting is None or _fits(self._owner, *fitting, len(inputs)) else ()


class ForwardBackward(ChecksCount):
    """
    Runs one network forward and backward. The network returns one loss, of any shape, which trains `weights`; with
    `has_aux` it returns the tuple `(loss, *aux)`, if it is `weighted`, `(loss, weight)` or `(loss, weight, *aux)`.
    `may_return_tuple` allows a tuple of one loss. `owner`, the training cell's name, and the network's number in the
    step are for error messages.

    Returns the tuple of the loss as the network gave it, divided by its weight; the tuple of aux; the tuple of the
    scaled gradients: those of `sum(loss) * scale`, whatever the weight; and the tuple of the weight, 1 for a network
    that is not weighted.
    """

    def __init__(self, network, weights, has_aux, owner, number=0, may_return_tuple=False, weighted=False):
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = weights
        self.has_aux = has_aux
        self.number = number
        self.weighted = weighted
        self._may_return_tuple = may_return_tuple
        self._one = Tensor(1.0, mstype.float32)
        self._owner = owner
        # With has_aux, one forward gives the scaled loss to differentiate and also what the user gets back.
        self._value_and_grad = ops.value_and_grad(self._scaled_loss, None, weights, has_aux=True)

    def losses(self):
        """Returns a list of the network, the weights that its loss trains, and the loss's place in a tuple, or None."""
        return [(self.network, tuple(self.weights), 0 if self.has_aux or self.weighted else None)]

    def _scaled_loss(self, scale, *inputs):
        output, weight = self.network(*inputs), ()
        if self.weighted:
            output, weight = without_weight(self._owner, self.number, output, self.has_aux)
        output = loss_first(self._owner, self.number, output)
        if self.has_aux:
            loss, aux = loss_and_aux_of(self._owner, self.number, output)
        else:
            loss, aux = loss_of(self._owner, self.number, output, self._may_return_tuple), ()
        # The copy is made here, and not after the backward: if the network sets an attribute of an object that is no
        # Cell, graph mode would free the loss before it is scaled ("does not have a valid ptr of actor").
        returned = mean_of(loss, weight) if self.weighted else gradients.copy(loss)
        return scaled(loss, scale), returned, weight, aux

    def construct(self, scale, *inputs):
        inputs = self._fitting_inputs(inputs)
        results, grads = self._value_and_grad(of_network(self.number, scale), *inputs)
        # By their numbers: graph mode warns of a name that nothing uses.
        aux = _copy(results[3]) if self.has_aux else ()
        return (results[1],), aux, grads, (results[2] if self.weighted else self._one,)


class SharedForwardBackward(ChecksCount):
    """
    Runs a network with N losses: forward once, and backward once for each loss. The network returns the losses as a
    tuple, `(*losses, *aux)` with `has_aux`. `weights` has an entry for each loss.

    Returns the tuple of the losses' sums, float32, the tuple of aux, the flat tuple of the gradients of each
    `sum(loss) * scale` with respect to its own weights, and an empty tuple, since the losses have no weights.
    """

    weighted = False

    def __init__(self, network, weights, has_aux, owner):
        super().__init__(auto_prefix=False)
        self.network = network
        self.has_aux = has_aux
        self._losses = len(weights)
        self._owner = owner
        self.weights_of_each = weights

    def losses(self):
        """Returns for each loss the network, the weights that it trains, and its place in what the network returns."""
        return [(self.network, tuple(weights), i) for i, weights in enumerate(self.weights_of_each)]

    def _losses_and_aux(self, *inputs):
        """Returns the losses' sums, aux's leaves, and its form: MindSpore differentiates neither dicts nor None."""
        output = self.network(*inputs)
        losses = check_losses(self._owner, self._losses, self.has_aux, output)
        # All at once: one by one, graph mode fails if aux has two dicts with different keys.
        results = gradients.sums(losses)
        if self.has_aux:
            aux = output[self._losses :]
            results += (*of_each_tensor(ops.stop_gradient, leaves_in(aux)), form_of(aux))
        return results

    # Compiled in PyNative mode too: there MindSpore would run the forward again for each backward.
    @jit
    def construct(self, scale, *inputs):
        inputs = self._fitting_inputs(inputs)
        results = self._losses_and_aux(*inputs)
        grads = ()
        for i, weights in enumerate(self.weights_of_each):
            cotangents = ()
            for j, result in enumerate(results):
                cotangents += (of_network(i, scale),) if i == j else of_each_tensor(ops.zeros_like, (result,))
            grads += backward_of_shared_forward(self._losses_and_aux, weights)(*inputs, cotangents)
        aux = ()
        if self.has_aux:
            aux = in_form(results[-1], of_each_tensor(gradients.copy, results[self._losses : -1]))
        return results[: self._losses], aux, grads, ()


class ForwardsAndBackwards(nn.Cell):
    """
    Clears an NPU's register, then runs all networks of a step once, one after the other, with the same weights.

    Args:
        owner (str): The training cell's name, for error messages.
        forward_backwards (list[Cell]): A ForwardBackward for each network, or one SharedForwardBackward.
        network_inputs (Optional[tuple]): Positions of the inputs that each network takes; None means all.
        packing (Packing): Packs the gradients.
        scale_shape (tuple[int, ...]): The shape of the loss scale.
        overflow_detector (OverflowDetector): What clears the register.
        memory (MemoryInUse): Of the Parameters that the forward may write.

    Inputs:
        - **scale** (Tensor) - The loss scale, float32 of shape :math:`()`, or one for each network, :math:`(N,)`.
        - **inputs** (tuple) - The inputs of the step.

    Outputs:
        Tuple of four: the tuple of all losses; the tuple of each network's aux; the tuple of all gradients, packed; and
        the tuple of all weights, empty if no network is weighted.
    """

    def __init__(
        self,
        owner: str,
        forward_backwards: list[nn.Cell],
        network_inputs: Optional[tuple[tuple[int, ...], ...]],
        packing: Packing,
        scale_shape: tuple[int, ...],
        overflow_detector: OverflowDetector,
        memory: MemoryInUse,
    ) -> None:
        super().__init__(auto_prefix=False)
        self._owner = owner
        self.forward_backwards = nn.CellList(forward_backwards, auto_prefix=False)
        self.has_aux = any(each.has_aux for each in forward_backwards)
        self._has_weights = any(each.weighted for each in forward_backwards)
        self._network_inputs = network_inputs
        self.packing = packing
        self._scale_shape = scale_shape
        self.overflow_detector = overflow_detector
        self._memory = memory

    def __call__(self, scale, inputs):
        # Graph mode does not come here: it knows only `construct`, and writes in place.
        results = super().__call__(scale, inputs)
        self._memory.put_back_within_a_step()
        return results

    def construct(self, scale, inputs):
        inputs = self.overflow_detector.start(inputs)
        # The scale waits, too: the backward starts from it, and at a linear layer need not wait for the forward.
        its_scale = ops.depend(scale, inputs)
        losses, auxes, grads, weights = (), (), (), ()
        for i in range(len(self.forward_backwards)):  # Graph mode would parse ten functions for `enumerate`.
            its_inputs = inputs_of(self._owner, i, self._network_inputs, inputs)
            its = self.forward_backwards[i](its_scale, *its_inputs)
            losses += its[0]
            auxes += (its[1],)
            grads += its[2]
            if self._has_weights:
                weights += its[3]
        # Losses and aux are copies, and must be made before an optimizer changes what they show.
        copies = losses + tensors_in(auxes) if self.has_aux else losses
        return losses, auxes, ops.depend(self.packing.pack(grads), copies), weights

    def set_inputs_of_compiled(self, inputs):
        """Tells the parts that PyNative mode compiles separately which dimensions of their inputs vary."""
        for i, forward_backward in enumerate(self.forward_backwards):
            if isinstance(forward_backward, SharedForwardBackward):
                its_inputs = inputs_of(self._owner, i, self._network_inputs, inputs)
                forward_backward.set_inputs(Tensor(shape=self._scale_shape, dtype=mstype.float32), *its_inputs)

    def losses(self):
        """Returns for each loss the network, the weights that it trains, and its place in what the network returns."""
        return [loss for each in self.forward_backwards for loss in each.losses()]


def check_network_inputs(owner, network_inputs, networks):
    """Raises unless `network_inputs` is None or gives positions for each network. Returns it as a tuple of tuples."""
    if network_inputs is None:
        return None
    what = f"For '{owner}', the argument 'network_inputs' must be None or a list with a tuple of positions for each"
    if not isinstance(network_inputs, (list, tuple)) or not all(isinstance(p, (list, tuple)) for p in network_inputs):
        raise TypeError(f"{what} network, [(0, 1), (1,)] say, but got {describe(network_inputs)}.")
    if len(network_inputs) != len(networks):
        raise ValueError(f"{what} of the {len(networks)} networks, but got {len(network_inputs)}: {network_inputs!r}.")
    for position in (position for positions in network_inputs for position in positions):
        if not isinstance(position, numbers.Integral) or isinstance(position, bool):
            raise TypeError(f"{what} network, integers >= 0, but got {describe(position)}.")
        if position < 0:
            raise ValueError(f"{what} network, integers >= 0 counted from the first input, but got {position}.")
    return tuple(tuple(int(position) for position in positions) for positions in network_inputs)


def inputs_of(owner, i, network_inputs, inputs):
    """Returns the inputs that network `i` of the cell `owner` takes."""
    if network_inputs is None:
        return inputs
    taken = ()
    for position in network_inputs[i]:
        if position >= len(inputs):
            raise ValueError(
                f"For '{owner}', the argument 'network_inputs' gives network {i} the input at position {position}, but "
                f"the cell was called with {len(inputs)} inputs. Positions count from 0."
            )
        taken += (inputs[position],)
    return taken
