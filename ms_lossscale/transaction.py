"""One training step as a transaction: all of it happens, or nothing but the loss scale and the counters moves."""

from mindspore import ParameterTuple, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import gradients
from ms_lossscale._check import check_bool, check_cell
from ms_lossscale.accepted_loss_scale import as_loss_scale
from ms_lossscale.forward_backward import ForwardBackward
from ms_lossscale.forward_state import ForwardState
from ms_lossscale.optimizers import Optimizers, check_optimizer, own_learning_rates
from ms_lossscale.overflow_detector import NoCheck, OverflowDetector, default_overflow_detector
from ms_lossscale.parameter_names import check_unique_names
from ms_lossscale.step_counters import StepCounters


class Transaction(nn.TrainOneStepCell):
    """
    The step of N networks and N optimizers that share one loss scale, one verdict and one conditional update.

    `construct` is the order of events, `_step` its stages. One network is the case N = 1.
    """

    def __init__(self, networks, optimizers, loss_scale, *, has_aux, forward_state, after_update, overflow_detector):
        owner = type(self).__name__
        for network in networks:
            check_cell(owner, "network", network, "Pass a network that returns the loss, an nn.WithLossCell say.")
        for optimizer in optimizers:
            check_optimizer(owner, optimizer, networks)
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
        one = len(networks) == 1
        super().__init__(
            networks[0] if one else nn.CellList(networks, auto_prefix=False),
            optimizers[0] if one else Optimizers(optimizers),
        )
        self.loss_scale = as_loss_scale(owner, loss_scale)
        self.overflow_detector = overflow_detector if self.loss_scale.drop_overflow_update else NoCheck()
        self.forward_state = ForwardState(networks, forward_state, owner)
        self.forward_backwards = nn.CellList(
            [
                ForwardBackward(network, optimizer.parameters, has_aux, owner)
                for network, optimizer in zip(networks, optimizers)
            ],
            auto_prefix=False,
        )
        self.after_update = after_update
        self.step_counters = StepCounters()
        learning_rates = own_learning_rates(optimizers)
        if learning_rates:
            self.learning_rates = ParameterTuple(learning_rates)
        # Optimizers want a gradient in the dtype of its weight.
        self._casts = any(weight.dtype != mstype.float32 for weight in self.weights)
        if self.reducer_flag:
            self._maximum_of_ranks = ops.AllReduce(ops.ReduceOp.MAX)
        check_unique_names(owner, self)

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
        """The step's order of events. Returns the tuples of losses and of aux, the verdict, and the scale used."""
        scale = gradients.copy(self.loss_scale.scale_value)
        inputs, saved_state = self.forward_state.save(inputs)
        inputs = self.overflow_detector.start(inputs)
        losses, auxes, grads = self._forward_backward(scale, inputs)
        grads = gradients.multiply(grads, 1.0 / scale)
        grads = self.grad_reducer(grads)
        overflow = self._verdict(grads)
        self.loss_scale.adjust(ops.logical_not(overflow))
        self._conclude(overflow, grads, saved_state)
        return losses, auxes, overflow, scale

    def _forward_backward(self, scale, inputs):
        losses, auxes, grads = (), (), ()
        for forward_backward in self.forward_backwards:
            loss, aux, gradient = forward_backward(scale, *inputs)
            losses, auxes, grads = losses + (loss,), auxes + (aux,), grads + gradient
        return losses, auxes, grads

    def _verdict(self, grads):
        overflow = self.overflow_detector(grads)
        if self.reducer_flag:
            # As a float: a flag in a small integer type could wrap around.
            overflow = self._maximum_of_ranks(overflow.astype(mstype.float32)) > 0.0
        return overflow

    def _conclude(self, overflow, grads, saved_state):
        if overflow:
            self._undo(saved_state)
        else:
            self._update(grads)

    def _update(self, grads):
        if self._casts:
            grads = gradients.cast_like(grads, self.weights)
        self.optimizer(grads)
        if self.after_update is not None:
            self.after_update()
        self.step_counters.count_applied()

    def _undo(self, saved_state):
        self.forward_state.restore(saved_state)
        self.step_counters.count_skipped()
