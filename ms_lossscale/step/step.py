"""A training step: the scaled forward and backward of its networks, a transaction around it, and further attempts."""

from mindspore import Tensor, jit, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import of_network
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore.graphs import backward_of_shared_forward
from ms_lossscale._mindspore.pynative import forget_failed_calls
from ms_lossscale.step.returned import as_weight, mean_of, returned_values
from ms_lossscale.step.settings import CallOfMethod


class Step(nn.Cell):
    """
    Runs N networks, and updates with N optimizers. With `max_retries`, it runs the networks again at a lower scale
    while they overflow, a lower scale can help, and retries are left. Each attempt that overflows counts as an overflow
    for the update rule.

    Returns the tuples of losses and of aux, whether the step was skipped, and the scale that was used. Index the result
    rather than unpack it: graph mode warns about unused names.
    """

    def __init__(self, transaction, forwards_and_backwards, max_retries, compiled):
        super().__init__(auto_prefix=False)
        self.transaction = transaction
        self.forwards_and_backwards = forwards_and_backwards
        self._compiled = compiled
        self.flush_cycle = None
        if transaction.cycle is not None:
            self.flush_cycle = compiled(CallOfMethod(transaction.flush).construct)
        self._retries = None
        if max_retries > 0:
            self.check_attempt = compiled(transaction.check_attempt)
            self.end_of_attempts = compiled(transaction.end_of_attempts)
            self._retries = Tensor(max_retries, mstype.int32)
            self._none, self._one = Tensor(0, mstype.int32), Tensor(1, mstype.int32)
        else:
            self.end_of_call = compiled(transaction.end_of_call)

    def construct(self, *inputs):
        scale, inputs, saved = self.transaction.begin(inputs)
        if self._retries is not None:
            return self._retried(scale, inputs, saved)
        losses, auxes, grads, weights = self.forwards_and_backwards(scale, inputs)
        return losses, auxes, self.end_of_call(grads, losses, weights, scale, saved), scale

    def _retried(self, scale, inputs, saved):
        # The networks may write to their inputs.
        kept = gradients.copy(inputs)
        # The call of the networks is written twice: MindSpore can't compile a method with it that is called twice.
        losses, auxes, grads, weights = self.forwards_and_backwards(scale, ops.depend(inputs, kept))
        # Without empty tuples, which graph mode can't pass to, or from, what is called twice.
        has_aux = self.forwards_and_backwards.has_aux
        checked = self.check_attempt(losses, grads, scale, saved, *weights)
        overflow, again, left, used = checked[1], checked[2], self._retries, scale
        # One flat tuple in the loop, where graph mode forgets the length of a tuple of equal tensors: the bool differs.
        # It is the last one: if it were the first, MindSpore would never free the training cell.
        last = losses + checked[0] + weights + (_flat(auxes) if has_aux else ()) + checked[3:] + (overflow,)
        while prim.logical_and(again, prim.greater(left, self._none)):
            left = prim.sub(left, self._one)
            used = self.transaction.back_off(used, overflow, saved)
            tried = self.forwards_and_backwards(used, gradients.copy(ops.depend(kept, used)))
            checked = self.check_attempt(tried[0], tried[2], used, saved, *tried[3])
            overflow, again = checked[1], checked[2]
            last = tried[0] + checked[0] + tried[3] + (_flat(tried[1]) if has_aux else ()) + checked[3:] + (overflow,)
        at, end = len(losses), len(losses) + len(grads)
        last_losses, last_grads, others = last[:at], last[at:end], last[end:-1]
        if self.forwards_and_backwards.has_weights:
            weights, others = others[: len(weights)], others[len(weights) :]
        if has_aux:
            last_auxes = ()
            for aux in auxes:
                last_auxes += (others[: len(aux)],)
                others = others[len(aux) :]
            auxes = last_auxes
        overflow = self.end_of_attempts(last_grads, overflow, others, last_losses, weights, used, saved)
        return last_losses, auxes, overflow, used

    def make_trial(self):
        """Makes what tells whether a batch would overflow at the present scale."""
        return Trial(self.transaction, self.forwards_and_backwards, self._compiled)

    def flush(self):
        """Ends a cycle that has begun. Returns whether it overflowed, a bool Tensor, or None if none has begun."""
        return self.flush_cycle() if self.transaction.has_begun() else None


def _flat(tuples):
    flat = ()
    for each in tuples:
        flat += each
    return flat


class ForwardBackward(nn.Cell):
    """
    Runs one network forward and backward. The network returns one loss, of any shape, which trains `weights`; with
    `has_aux` it returns the tuple `(loss, *aux)`, if it is `weighted`, `(loss, weight)` or `(loss, weight, *aux)`.
    `may_return_tuple` allows a tuple of one loss. `owner`, the training cell's name, and the network's number in the
    step are for error messages.

    Returns the tuple of the loss as the network gave it, divided by its weight; the tuple of aux; the tuple of the
    scaled gradients: those of `sum(loss) * scale`, whatever the weight; and the weight, 1 for a network without.
    """

    def __init__(self, network, weights, has_aux, owner, number=0, may_return_tuple=False, weighted=False):
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = weights
        self.has_aux, self.weighted, self.number = has_aux, weighted, number
        self._may_return_tuple = may_return_tuple
        self._one = Tensor(1.0, mstype.float32)
        self._owner = owner
        # With has_aux, one forward gives the scaled loss to differentiate and also what the user gets back.
        self._value_and_grad = ops.value_and_grad(self._scaled_loss, None, weights, has_aux=True)

    def losses(self):
        """Returns a list of the network, the weights that its loss trains, and the loss's place in a tuple, or None."""
        return [(self.network, tuple(self.weights), 0 if self.has_aux or self.weighted else None)]

    def _scaled_loss(self, scale, *inputs):
        loss, weight, aux = self._taken_apart(self.network(*inputs))
        # The copy is made here, and not after the backward: if the network sets an attribute of an object that is no
        # Cell, graph mode would free the loss before it is scaled ("does not have a valid ptr of actor").
        returned = mean_of(loss, weight) if self.weighted else prim.deepcopy(loss)
        return gradients.scaled(loss, scale), returned, weight, aux

    def _taken_apart(self, output):
        if isinstance(output, Tensor) and not (self.has_aux or self.weighted):
            return output, self._one, ()
        fixed = 2 if self.weighted else 1
        may_be = self.has_aux or self.weighted or self._may_return_tuple
        values = returned_values(self._owner, self.number, output, fixed, self.has_aux, may_be, self.weighted)
        return values[0], as_weight(self._owner, values[1]) if self.weighted else self._one, values[fixed:]

    def construct(self, scale, *inputs):
        results, grads = self._value_and_grad(of_network(self.number, scale), *inputs)
        # By their numbers: graph mode warns of a name that nothing uses.
        aux = gradients.copy(results[3]) if self.has_aux and len(results[3]) > 0 else ()
        return (results[1],), aux, grads, results[2]


class SharedForwardBackward(nn.Cell):
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
        self._losses, self._owner = len(weights), owner
        self.weights_of_each = weights

    def losses(self):
        """Returns for each loss the network, the weights that it trains, and its place in what the network returns."""
        return [(self.network, tuple(weights), i) for i, weights in enumerate(self.weights_of_each)]

    def _losses_and_aux(self, *inputs):
        output = self.network(*inputs)
        values = returned_values(self._owner, 0, output, self._losses, self.has_aux, self._losses > 1, False)
        results = gradients.sums(values[: self._losses])
        for aux in values[self._losses :]:
            results += (ops.stop_gradient(aux),)
        return results

    # Compiled in PyNative mode too: there MindSpore would run the forward again for each backward.
    @jit
    def construct(self, scale, *inputs):
        results = self._losses_and_aux(*inputs)
        grads = ()
        for i, weights in enumerate(self.weights_of_each):
            cotangents = ()
            for j, result in enumerate(results):
                cotangents += (of_network(i, scale) if i == j else ops.zeros_like(result),)
            grads += backward_of_shared_forward(self._losses_and_aux, weights)(*inputs, cotangents)
        aux = results[self._losses :]
        aux = gradients.copy(aux) if len(aux) > 0 else ()
        return results[: self._losses], aux, grads, ()


class ForwardsAndBackwards(nn.Cell):
    """
    Clears an NPU's register, then runs all networks of a step once, one after the other, with the same weights.

    Args:
        owner (str): The training cell's name, for error messages.
        forward_backwards (list[Cell]): A ForwardBackward for each network, or one SharedForwardBackward.
        network_inputs (Optional[tuple]): Positions of the inputs that each network takes; None means all.
        transaction (Transaction): What begins and ends the step.

    Inputs:
        - **scale** (Tensor) - The loss scale, float32 of shape :math:`()`, or one for each network, :math:`(N,)`.
        - **inputs** (tuple) - The inputs of the step.

    Outputs:
        Tuple of four: the tuple of all losses; the tuple of each network's aux; the tuple of all gradients; and
        the tuple of all weights, empty if no network is weighted.
    """

    def __init__(self, owner, forward_backwards, network_inputs, transaction):
        super().__init__(auto_prefix=False)
        self._owner = owner
        self.forward_backwards = nn.CellList(forward_backwards, auto_prefix=False)
        self.has_aux = any(each.has_aux for each in forward_backwards)
        self.has_weights = any(each.weighted for each in forward_backwards)
        self._network_inputs = network_inputs
        self._scale_shape = transaction.scale_shape
        self.overflow_detector = transaction.detector if transaction.overflow_check.starts else None
        # Hidden from MindSpore: it is a part of the transaction.
        object.__setattr__(self, "_forward_state", transaction.forward_state)

    def __call__(self, scale, inputs):
        # Graph mode does not come here: it knows only `construct`, and writes in place.
        try:
            results = super().__call__(scale, inputs)
        except BaseException:
            forget_failed_calls()
            self._forward_state.restore_held()
            raise
        self._forward_state.memory.put_back_within_a_step()
        return results

    def construct(self, scale, inputs):
        if self.overflow_detector is not None:
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
            if self.has_weights:
                weights += (its[3],)
        # Losses and aux are copies, and must be made before an optimizer changes what they show.
        return losses, auxes, ops.depend(grads, (losses, auxes)), weights

    def set_inputs_of_compiled(self, inputs):
        """Tells the parts that PyNative mode compiles separately which dimensions of their inputs vary."""
        for i, forward_backward in enumerate(self.forward_backwards):
            if isinstance(forward_backward, SharedForwardBackward):
                its_inputs = inputs_of(self._owner, i, self._network_inputs, inputs)
                forward_backward.set_inputs(Tensor(shape=self._scale_shape, dtype=mstype.float32), *its_inputs)

    def losses(self):
        """Returns for each loss the network, the weights that it trains, and its place in what the network returns."""
        return [loss for each in self.forward_backwards for loss in each.losses()]


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


class Trial(nn.Cell):
    """
    Runs a batch forward and backward at the present loss scale, undoes it, and updates nothing. Returns whether an
    overflow was found.
    """

    def __init__(self, transaction, forwards_and_backwards, compiled):
        super().__init__(auto_prefix=False)
        self.transaction, self.forwards_and_backwards = transaction, forwards_and_backwards
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))
        self.check = compiled(transaction.check_trial)

    def __call__(self, *inputs):
        self.transaction.forward_state.remember()
        return super().__call__(*inputs)

    def construct(self, *inputs):
        inputs = gradients.copy(self.use_parameters(inputs))
        saved, scales = gradients.copy(self.transaction.forward_state.written), ()
        for loss_scale in self.transaction.loss_scales:
            scales += (prim.deepcopy(loss_scale.scale_value),)
        scale = self.transaction.of_all(scales)
        tried = self.forwards_and_backwards(scale, ops.depend(inputs, saved))
        overflow = self.check(tried[2], tried[3], scale, saved)
        return ops.depend(overflow, self.transaction.forward_state.restore_call(saved))
