"""The scaled forwards and backwards of a step's networks."""

from mindspore import Tensor, mutable, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._mindspore.graphs import CompiledForModes, backward_of_shared_forward, is_compiling
from ms_lossscale._mindspore.pynative import forget_failed_calls
from ms_lossscale.step.returned import ReturnedValues, as_weight, mean_of


class NetworksRun(nn.Cell):
    """
    Base class of what runs the networks of a step once, forward and backward, one after the other and with the same
    weights. On an NPU, the status register is cleared before.

    Args:
        plan (StepPlan): What the step is built of.
        transaction (Transaction): What begins and ends the step.

    Inputs:
        - **scales** (tuple[Tensor]) - The loss scales.
        - **inputs** (tuple) - The inputs of the step.
        - **saved** (tuple) - What the forward writes, as it was before.

    Outputs:
        Tuple of two: the Call, and the tuple of each network's aux.
    """

    def __init__(self, plan, transaction):
        super().__init__(auto_prefix=False)
        self._owner = plan.owner
        self._network_inputs = plan.network_inputs
        self._scale_of_network = plan.scale_of_network
        self._has_loss_weights = any(plan.settings.weighted)
        self._has_any_aux = any(plan.settings.has_aux)
        self.overflow_detector = transaction.overflow_check.detector if transaction.overflow_check.starts else None
        # Hidden from MindSpore: it is a part of the transaction.
        object.__setattr__(self, "_forward_state", transaction.forward_state)

    def __call__(self, scales, inputs, saved):
        # Graph mode does not come here: it knows only `construct`, and writes in place.
        try:
            results = super().__call__(scales, inputs, saved)
        except BaseException:
            forget_failed_calls()
            self._forward_state.restore_held()
            raise
        self._forward_state.memory.put_back_within_a_step()
        return results

    def construct(self, scales, inputs, saved):
        if self.overflow_detector is not None:
            inputs = self.overflow_detector.start(inputs)
        # The scales wait, too: a backward starts from its scale, and at a linear layer need not wait for the forward.
        # Indexed, since graph mode warns of a name that nothing uses.
        results = self.run(ops.depend(scales, inputs), inputs)
        losses = results[0]
        auxes = results[1]
        # Losses and aux are copies, and must be made before an optimizer changes what they show. Without aux there are
        # empty tuples: of these constants MindSpore's Ascend backend may say "Parameters size:2 out of range".
        copies = (losses, auxes) if self._has_any_aux else losses
        call = {"scales": scales, "losses": losses, "gradients": ops.depend(results[2], copies)}
        if len(saved) > 0:
            call["saved"] = saved
        if self._has_loss_weights:
            call["loss_weights"] = results[3]
        return call, auxes

    def run(self, scales, inputs):
        """Returns four tuples: losses, the aux of each network, the gradients of each loss, and its weight, if any."""
        raise NotImplementedError

    def taken_inputs(self, number, inputs):
        """Returns the inputs that this network takes."""
        return inputs_of(self._owner, number, self._network_inputs, inputs)

    def networks(self):
        """Returns the networks that it runs."""
        raise NotImplementedError

    def losses(self):
        """Returns for each loss the network, the weights that it trains, and its place in what the network returns."""
        raise NotImplementedError

    def set_inputs_of_compiled(self, inputs):
        """Tells the parts that PyNative mode compiles separately which dimensions of their inputs vary."""


class ForwardBackward(NetworksRun):
    """
    Runs one network. It returns one loss, of any shape; with `has_aux` the tuple `(loss, *aux)`, if it is `weighted`,
    `(loss, weight)` or `(loss, weight, *aux)`. The gradients are those of `sum(loss) * scale`, whatever the weight. A
    weighted loss comes back divided by its weight.
    """

    def __init__(self, plan, transaction, i=0):
        super().__init__(plan, transaction)
        self.network = plan.networks[i]
        self.weights = plan.weights[i]
        self.number = plan.number + i
        self.has_aux = plan.settings.has_aux[i]
        self.weighted = plan.settings.weighted[i]
        self._one = Tensor(1.0, mstype.float32)
        self._returned_values = ReturnedValues(
            plan.owner,
            self.number,
            has_aux=self.has_aux,
            weighted=self.weighted,
            may_be_tuple=plan.may_return_tuple or self.has_aux or self.weighted,
        )
        # MindSpore's own `has_aux`: one forward gives the scaled loss to differentiate, and what the user gets back.
        self._value_and_grad = ops.value_and_grad(self._scaled_loss, None, self.weights, has_aux=True)

    def networks(self):
        return [self.network]

    def losses(self):
        return [(self.network, tuple(self.weights), 0 if self.has_aux or self.weighted else None)]

    def _scaled_loss(self, scale, *inputs):
        loss, weight, aux = self._taken_apart(self.network(*inputs))
        # The copy is made here, and not after the backward: if the network sets an attribute of an object that is no
        # Cell, graph mode would free the loss before it is scaled ("does not have a valid ptr of actor").
        returned = mean_of(loss, weight) if self.weighted else prim.deepcopy(loss)
        return gradients.scaled(loss, scale), returned, weight, aux

    def _taken_apart(self, output):
        if isinstance(output, Tensor) and not (self.has_aux or self.weighted):
            # Graph mode would parse the look at one value, too.
            return output if output.ndim == 0 else self._returned_values.look_at(output), self._one, ()
        values = self._returned_values(output)
        if self.weighted:
            return values[0], as_weight(self._owner, values[1]), values[2:]
        return self._returned_values.look_at(values[0]), self._one, values[1:]

    def run_network(self, scale, inputs):
        """Returns the network's loss, its aux, its gradients, and the weight of its loss."""
        results, grads = self._value_and_grad(scale, *inputs)
        # By their numbers: graph mode warns of a name that nothing uses.
        aux = gradients.copy(results[3]) if self.has_aux and len(results[3]) > 0 else ()
        return results[1], aux, grads, results[2]

    def run(self, scales, inputs):
        loss, aux, grads, weight = self.run_network(scales[0], self.taken_inputs(0, inputs))
        return (loss,), (aux,), (grads,), (weight,)


class ForwardsAndBackwards(NetworksRun):
    """Runs several networks, one after the other."""

    def __init__(self, plan, transaction):
        super().__init__(plan, transaction)
        parts = [ForwardBackward(plan, transaction, i) for i in range(len(plan.networks))]
        self.parts = nn.CellList(parts, auto_prefix=False)

    def networks(self):
        return [part.network for part in self.parts]

    def losses(self):
        return [loss for part in self.parts for loss in part.losses()]

    def run(self, scales, inputs):
        losses, auxes, grads, loss_weights = (), (), (), ()
        for i in range(len(self.parts)):  # Graph mode would parse ten functions for `enumerate`.
            scale = scales[self._scale_of_network[i]]
            results = self.parts[i].run_network(scale, self.taken_inputs(i, inputs))
            losses = (*losses, results[0])
            auxes = (*auxes, results[1])
            grads = (*grads, results[2])
            loss_weights = (*loss_weights, results[3])
        return losses, auxes, grads, loss_weights


class SharedForwardBackward(NetworksRun):
    """
    Runs a network with N losses: forward once, and backward once for each loss. The network returns the losses as a
    tuple, `(*losses, *aux)` with `has_aux`. What comes back are the losses' sums, float32. They have no weights.
    """

    def __init__(self, plan, transaction):
        super().__init__(plan, transaction)
        self.network = plan.networks[0]
        self.has_aux = plan.settings.has_aux[0]
        self.weights_of_losses = plan.weights
        self._count = len(plan.weights)
        self._returned_values = ReturnedValues(
            plan.owner, 0, losses=self._count, has_aux=self.has_aux, may_be_tuple=self._count > 1
        )
        # Compiled in PyNative mode, too: there MindSpore would run the forward again for each backward.
        object.__setattr__(self, "_compiled", CompiledForModes(self.run_in_one_graph, self.network))

    def networks(self):
        return [self.network]

    def losses(self):
        return [(self.network, tuple(weights), i) for i, weights in enumerate(self.weights_of_losses)]

    def _losses_and_aux(self, *inputs):
        values = self._returned_values(self.network(*inputs))
        results = ()
        for i in range(self._count):
            results = (*results, gradients.sum_of(self._returned_values.look_at(values[i], i)))
        for aux in values[self._count :]:
            results = (*results, ops.stop_gradient(aux))
        return results

    def run(self, scales, inputs):
        inputs = self.taken_inputs(0, inputs)
        if is_compiling():
            return self.run_in_one_graph(scales, *inputs)
        return self._compiled(scales, *inputs)

    def run_in_one_graph(self, scales, *inputs):
        results = self._losses_and_aux(*inputs)
        grads = ()
        for i in range(len(self.weights_of_losses)):
            scale = scales[self._scale_of_network[i]]
            cotangents = ()
            for j in range(len(results)):
                cotangents = (*cotangents, scale if i == j else ops.zeros_like(results[j]))
            backward = backward_of_shared_forward(self._losses_and_aux, self.weights_of_losses[i])
            grads = (*grads, backward(*inputs, cotangents))
        aux = results[self._count :]
        return results[: self._count], (gradients.copy(aux) if len(aux) > 0 else (),), grads, ()

    def set_inputs_of_compiled(self, inputs):
        scale = Tensor(shape=(), dtype=mstype.float32)
        self._compiled.set_inputs(mutable((scale,) * len(self._scale_of_network)), *self.taken_inputs(0, inputs))


def inputs_of(owner, number, network_inputs, inputs):
    """Returns the inputs that a network of the cell `owner` takes."""
    if network_inputs is None:
        return inputs
    taken = ()
    for position in network_inputs[number]:
        if position >= len(inputs):
            raise ValueError(
                f"For '{owner}', the argument 'network_inputs' gives network {number} the input at position "
                f"{position}, but the cell was called with {len(inputs)} inputs. Positions count from 0."
            )
        taken = (*taken, inputs[position])
    return taken
