"""One training step as a transaction: all of it happens, or nothing but the loss scale and the counters moves."""

from mindspore import ParameterTuple, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import gradients
from ms_lossscale._check import check_bool, check_cell
from ms_lossscale.accepted_loss_scale import as_loss_scale
from ms_lossscale.forward_backward import ForwardBackward, SharedForwardBackward
from ms_lossscale.forward_state import ForwardState
from ms_lossscale.network_inputs import check_network_inputs, inputs_of
from ms_lossscale.optimizers import Optimizers, check_optimizers, own_learning_rates, prefix_states
from ms_lossscale.overflow_detector import NoCheck, OverflowDetector, default_overflow_detector
from ms_lossscale.parameter_names import add_prefix, check_unique_names
from ms_lossscale.step_counters import StepCounters


class Transaction(nn.TrainOneStepCell):
    """
    The step of N networks and N optimizers that share one loss scale, one verdict and one conditional update.

    :meth:`step` is the order of events. One network is the case N = 1.

    Args:
        owner (str): The name of the user's cell, for error messages.
        networks (tuple[Cell]): One loss cell for each optimizer, or one cell that returns a loss for each.
        optimizers (tuple[Cell]): The optimizers.
        loss_scale (Union[None, float, LossScale, ...]): The loss scale.
        network_inputs (list[tuple[int]], optional): Positions of the inputs that each network takes; None means all.
        prefix (str): For the names of the scale's and the counters' Parameters.
        has_aux, forward_state, after_update, overflow_detector: As the user's cell has them.
    """

    def __init__(
        self,
        owner,
        networks,
        optimizers,
        loss_scale,
        *,
        network_inputs=None,
        prefix="",
        has_aux,
        forward_state,
        after_update,
        overflow_detector,
    ):
        for network in networks:
            check_cell(owner, "network", network, "Pass a network that returns the loss, an nn.WithLossCell say.")
        check_optimizers(owner, optimizers, networks)
        prefix_states(optimizers)
        check_bool(owner, "has_aux", has_aux)
        if after_update is not None:
            check_cell(owner, "after_update", after_update, "Pass a Cell without inputs.")
        if overflow_detector is None:
            overflow_detector = default_overflow_detector()
        elif not isinstance(overflow_detector, OverflowDetector):
            raise TypeError(
                f"For '{owner}', the argument 'overflow_detector' must be an OverflowDetector or None, but got "
                f"'{type(overflow_detector).__name__}'. Derive your own from ms_lossscale.OverflowDetector."
            )
        super().__init__(
            networks[0] if len(networks) == 1 else nn.CellList(list(networks), auto_prefix=False),
            optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers),
        )
        self.loss_scale = as_loss_scale(owner, loss_scale)
        self.overflow_detector = overflow_detector if self.loss_scale.drop_overflow_update else NoCheck()
        self.forward_state = ForwardState(networks, forward_state, owner)
        weights = tuple(optimizer.parameters for optimizer in optimizers)
        if len(networks) == len(optimizers):
            forward_backwards = [ForwardBackward(*pair, has_aux, owner) for pair in zip(networks, weights)]
        else:
            forward_backwards = [SharedForwardBackward(networks[0], weights, has_aux, owner)]
        self.forward_backwards = nn.CellList(forward_backwards, auto_prefix=False)
        self.network_inputs = check_network_inputs(owner, network_inputs, networks)
        self.after_update = after_update
        self.step_counters = StepCounters()
        learning_rates = own_learning_rates(optimizers)
        if learning_rates:
            self.learning_rates = ParameterTuple(learning_rates)
        # Optimizers want a gradient in the dtype of its weight.
        self._casts = any(weight.dtype != mstype.float32 for weight in self.weights)
        if self.reducer_flag:
            self._maximum_of_ranks = ops.AllReduce(ops.ReduceOp.MAX)
        add_prefix(prefix, (*self.loss_scale.get_parameters(), *self.step_counters.get_parameters()))
        check_unique_names(owner, self.get_parameters())

    def get_loss_scale(self):
        """
        Reads the loss scale.

        Returns:
            float, the scale that the next step will use.
        """
        return self.loss_scale.get_loss_scale()

    def set_loss_scale(self, value):
        """
        Sets the loss scale by hand, between two steps; its law goes on from there.

        Args:
            value (float): The new scale, a finite number > 0.

        Raises:
            TypeError: If `value` is not a number.
            ValueError: If `value` is not finite or not > 0.
        """
        self.loss_scale.set_loss_scale(value)

    def counters(self):
        """
        Reads how many steps were applied and skipped.

        Returns:
            dict, with the ints `applied_steps`, `skipped_steps` and `consecutive_skipped_steps`.
        """
        return self.step_counters.as_dict()

    def step(self, *inputs):
        """The order of events. Returns the tuples of losses and of aux, the verdict, and the scale that was used."""
        scale = gradients.copy(self.loss_scale.scale_value)
        inputs, saved_state = self.forward_state.save(inputs)
        inputs = self.overflow_detector.start(inputs)
        # The backward starts from the scale, and need not wait for the forward where a layer is linear.
        scale = ops.depend(scale, inputs)
        losses, auxes, grads = self._forward_backward(scale, inputs)
        grads = gradients.multiply(grads, 1.0 / scale)
        grads = self.grad_reducer(grads)
        overflow = self._verdict(grads)
        self.loss_scale.adjust(ops.logical_not(overflow))
        overflow = self._conclude(overflow, grads, saved_state)
        return losses, auxes, overflow, scale

    def _forward_backward(self, scale, inputs):
        losses, auxes, grads = (), (), ()
        for i, forward_backward in enumerate(self.forward_backwards):
            its_losses, its_aux, its_grads = forward_backward(scale, *inputs_of(i, self.network_inputs, inputs))
            losses, auxes, grads = losses + its_losses, auxes + (its_aux,), grads + its_grads
        return losses, auxes, grads

    def _verdict(self, grads):
        overflow = self.overflow_detector(grads)
        if self.reducer_flag:
            # As a float: a flag in a small integer type could wrap around.
            overflow = self._maximum_of_ranks(overflow.astype(mstype.float32)) > 0.0
        return overflow

    def _conclude(self, overflow, grads, saved_state):
        """The one branch. The verdict that it returns comes after all that the branch did."""
        if overflow:
            self.forward_state.restore(saved_state)
            done = self.step_counters.count_skipped()
        else:
            self._update(grads)
            done = self.step_counters.count_applied()
        return ops.depend(overflow, done)

    def _update(self, grads):
        if self._casts:
            grads = gradients.cast_like(grads, self.weights)
        self.optimizer(grads)
        if self.after_update is not None:
            self.after_update()
