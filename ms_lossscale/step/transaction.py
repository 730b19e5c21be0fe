"""One training step as a transaction: all of it happens, or nothing but the loss scale and the counters moves."""

from mindspore import PYNATIVE_MODE, ParameterTuple, Tensor, get_context, jit, mutable, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._accepted_loss_scale import as_loss_scale
from ms_lossscale._check import check_between, check_bool, check_cell, check_positive_int
from ms_lossscale.cells.measurements import Measurements
from ms_lossscale.cells.rank_agreement import RankAgreement, settings_of
from ms_lossscale.overflow_detector import FiniteGradients, NoCheck, OverflowDetector, default_overflow_detector
from ms_lossscale.step.accumulation import Accumulation
from ms_lossscale.step.clipping import Clipping, check_clipping
from ms_lossscale.step.forward_backward import ForwardBackward, SharedForwardBackward
from ms_lossscale.step.forward_state import ForwardState
from ms_lossscale.step.moving_average import MovingAverage
from ms_lossscale.step.network_inputs import check_network_inputs, inputs_of
from ms_lossscale.step.optimizers import Optimizers, check_optimizers, prefix_states, unlisted_state
from ms_lossscale.step.parameter_names import add_prefix, check_unique_names
from ms_lossscale.step.step_counters import StepCounters


def _is_library_cell(cell):
    return type(cell).__module__.partition(".")[0] in ("mindspore", "ms_lossscale")


class Transaction(Measurements, RankAgreement):
    """
    The step of N networks and N optimizers that share one loss scale, one verdict and one conditional update.

    :meth:`step` is the order of events. One network is the case N = 1.

    Args:
        owner (str): The name of the user's cell, for error messages.
        networks (tuple[Cell]): One loss cell for each optimizer, or one cell that returns a loss for each.
        optimizers (tuple[Cell]): The optimizers.
        loss_scale (Union[None, float, LossScale, ...]): The loss scale.
        network_inputs (list[tuple[int]], optional): Positions of the inputs that each network takes; None means all.
        may_return_tuple (bool): Whether a network may return its one loss as a tuple of one.
        prefix (str): For the names of the scale's and the counters' Parameters.
        clip_norms, clip_values, ema_decays (list): One entry for each optimizer.
        gradient_accumulation_steps, has_aux, forward_state, after_update, overflow_detector: As the user's cell has
            them.
    """

    def __init__(
        self,
        owner,
        networks,
        optimizers,
        loss_scale,
        *,
        network_inputs=None,
        may_return_tuple=False,
        prefix="",
        gradient_accumulation_steps,
        clip_norms,
        clip_values,
        ema_decays,
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
        super().__init__(owner, networks, optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers))
        self._optimizers = optimizers
        self.loss_scale = as_loss_scale(owner, loss_scale)
        self.overflow_detector = overflow_detector if self.loss_scale.drop_overflow_update else NoCheck()
        add_prefix(prefix, self.loss_scale.get_parameters())
        steps = check_positive_int(owner, "gradient_accumulation_steps", gradient_accumulation_steps)
        self._share = 1.0 / steps
        self._accumulates = steps > 1
        self.forward_state = ForwardState(networks, forward_state, owner, self._accumulates, prefix)
        weights = tuple(optimizer.parameters for optimizer in optimizers)
        if len(networks) == len(optimizers):
            forward_backwards = [
                ForwardBackward(*pair, has_aux, owner, may_return_tuple) for pair in zip(networks, weights)
            ]
        else:
            forward_backwards = [SharedForwardBackward(networks[0], weights, has_aux, owner)]
        self.forward_backwards = nn.CellList(forward_backwards, auto_prefix=False)
        self.network_inputs = check_network_inputs(owner, network_inputs, networks)
        self.after_update = after_update
        self.step_counters = StepCounters(self.weights, prefix)
        if self._accumulates:
            self.accumulation = Accumulation(steps, self.weights, prefix)
        self.clippings = nn.CellList(
            [
                Clipping(
                    *check_clipping(owner, *pair),
                    prefix if len(optimizers) == 1 else f"network_{i}.",
                    self._of_rank(weights[i]),
                )
                for i, pair in enumerate(zip(clip_norms, clip_values))
            ],
            auto_prefix=False,
        )
        self._norms_tell = type(self.overflow_detector) is FiniteGradients and all(
            clipping.measures for clipping in self.clippings
        )
        self._clipping_unscales = self._norms_tell and all(clipping.clips_norm for clipping in self.clippings)
        self.moving_averages = nn.CellList(
            [
                MovingAverage(check_between(owner, "ema_decay", decay, 0.0, 1.0), its_weights)
                for decay, its_weights in zip(ema_decays, weights)
                if decay is not None
            ],
            auto_prefix=False,
        )
        self._slices = gradients.slices(weights)
        # A user's own detector gets the gradients as they are, and so do the operators that exchange them.
        packs = not self.reducer_flag and _is_library_cell(self.overflow_detector)
        self._packings = tuple(map(gradients.packing_of if packs else gradients.no_packing_of, weights))
        unlisted = unlisted_state(optimizers)
        if unlisted:
            self.unlisted_state = ParameterTuple(unlisted)
        # Optimizers want a gradient in the dtype of its weight.
        self._casts = any(weight.dtype != mstype.float32 for weight in self.weights)
        # Where nothing is checked there is nothing to agree on.
        self._agrees = self.reducer_flag and self.loss_scale.drop_overflow_update
        if self._agrees:
            self._sum_of_ranks = ops.AllReduce()
        # In PyNative mode, too, what follows the gradients is compiled, as MindSpore's nn optimizers are. But a user's
        # own cell runs in Python there, as it is written, and so does an optimizer that reads its settings in each
        # step. What ranks exchange is MindSpore's to order.
        in_pynative = get_context("mode") == PYNATIVE_MODE
        self._in_python = in_pynative and (
            self.reducer_flag
            or after_update is not None
            or not all(isinstance(optimizer, nn.Optimizer) for optimizer in optimizers)
            or not all(map(_is_library_cell, (*optimizers, self.loss_scale, self.overflow_detector)))
        )
        self._compiles_use = in_pynative and not self._in_python
        self._prefix = prefix
        self._passed = {
            "networks": len(networks),
            "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
            "overflow_detector": type(self.overflow_detector).__name__,
            "gradient_accumulation_steps": steps,
            **{
                name: [value if value is None else float(value) for value in values]
                for name, values in (("clip_norm", clip_norms), ("clip_value", clip_values), ("ema_decay", ema_decays))
            },
            **{f"loss_scale.{name}": value for name, value in settings_of(self.loss_scale).items()},
        }
        check_unique_names(owner, self.get_parameters())

    def rank_settings(self):
        """What was passed to the cell and must be the same on all ranks."""
        return {f"{self._prefix}{name}": value for name, value in self._passed.items()}

    def rank_state(self):
        """The small Parameters that have the same values on all ranks."""
        weights = {id(weight) for weight in self.weights}
        optimizers = [p for optimizer in self._optimizers for p in optimizer.get_parameters() if id(p) not in weights]
        state = [p for p in (*optimizers, *getattr(self, "unlisted_state", ())) if p.size == 1]
        # Not which gradients overflowed: of weights that are a rank's own, each rank knows its own.
        counters = [p for p in self.step_counters.get_parameters() if p is not self.step_counters.overflowed]
        state += [*self.loss_scale.get_parameters(), *counters]
        if self._accumulates:
            state += [self.accumulation.micro_steps, self.accumulation.loss_scale]
        return state

    def _of_rank(self, weights):
        """Which gradients the reducer leaves to each rank; empty if it reduces all."""
        of_rank = tuple(weight.layerwise_parallel for weight in weights)
        return of_rank if self.reducer_flag and any(of_rank) else ()

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

    def overflowed_parameters(self):
        """
        Reads which gradients were not finite in the last step that was skipped. Training itself never waits for it.

        Returns:
            list[str], the names of their parameters. It is empty if no step was skipped, and if only an NPU's register
            told of the overflow, as in saturation mode.
        """
        return self.step_counters.overflowed_parameters()

    def flush(self):
        """
        Ends a partial accumulation window: averages over the calls that it really had, and updates or skips.

        Does nothing without accumulation, or at the beginning of a window.
        """
        if self._accumulates and self.accumulation.micro_steps.asnumpy() > 0:
            if self._in_python:
                self._flush()
            else:
                self._compiled_flush()

    def _flush(self):
        return self._close_window(
            self.accumulation.partial_mean(),
            gradients.copy(self.accumulation.loss_scale),
            gradients.copy(self.accumulation.overflow),
        )

    @jit
    def _compiled_flush(self):
        return self._flush()

    def _clippings(self):
        return list(self.clippings)

    def _moving_averages(self):
        return list(self.moving_averages)

    def step(self, *inputs):
        """
        The order of events.

        Returns the tuples of losses and of aux, the verdict, and the scale that was used. Whoever does not use all of
        them takes them by index: of what is unpacked and not used, graph mode warns as of a mistake.
        """
        scale, is_first = self._read_scale()
        inputs, saved_state = self.forward_state.save(inputs, is_first)
        inputs = self.overflow_detector.start(inputs)
        # The backward starts from the scale, and need not wait for the forward where a layer is linear.
        scale = ops.depend(scale, inputs)
        losses, auxes, grads = self._forward_backward(scale, inputs)
        if self._compiles_use:
            overflow = self._compiled_use(mutable(grads), scale, mutable(saved_state) if saved_state else ())
        else:
            overflow = self._use(grads, scale, saved_state)
        return losses, auxes, overflow, scale

    def _use(self, grads, scale, saved_state):
        """All that follows the gradients."""
        if self._accumulates:
            overflow = self._accumulate(gradients.multiply(grads, self._share / scale), scale)
        else:
            grads, divisor = self._unscale(grads, scale)
            overflow = self._conclude(grads, divisor, scale, Tensor(False), saved_state)
        return overflow

    @jit
    def _compiled_use(self, grads, scale, saved_state):
        return self._use(grads, scale, saved_state)

    def _read_scale(self):
        if self._accumulates:
            is_first = self.accumulation.is_first()
            return self.accumulation.window_scale(self.loss_scale.scale_value), is_first
        return gradients.copy(self.loss_scale.scale_value), True

    def _forward_backward(self, scale, inputs):
        losses, auxes, grads = (), (), ()
        for i, forward_backward in enumerate(self.forward_backwards):
            its_losses, its_aux, its_grads = forward_backward(scale, *inputs_of(i, self.network_inputs, inputs))
            losses, auxes, grads = losses + its_losses, auxes + (its_aux,), grads + its_grads
        # Losses and aux are copies: none may be taken after an optimizer has moved what it shows.
        return losses, auxes, ops.depend(self._packed(grads), (losses, auxes))

    def _packed(self, grads):
        """The gradients as the stages up to the branch want them: for each optimizer a tuple, see `gradients.pack`."""
        packed = ()
        for i, packing in enumerate(self._packings):
            packed += (gradients.pack(grads[self._slices[i][0] : self._slices[i][1]], packing),)
        return packed

    def _unpacked(self, packed):
        grads = ()
        for i, packing in enumerate(self._packings):
            grads += gradients.unpack(packed[i], packing)
        return grads

    def _unscale(self, grads, scale):
        """Returns the gradients and what they must still be divided by: clipping's multiply can do that, too."""
        if self._clipping_unscales and not self.reducer_flag:
            return grads, scale
        return gradients.multiply(grads, 1.0 / scale), Tensor(1.0, mstype.float32)

    def _accumulate(self, grads, scale):
        overflow = ops.logical_or(self.accumulation.overflow, self.overflow_detector(gradients.flat(grads)))
        grads = self._unpacked(grads)
        if self.accumulation.is_last():
            grads = gradients.add(self.accumulation.gradients, grads)
            overflow = self._close_window(grads, scale, overflow)
        else:
            self.accumulation.add(grads, overflow)
            self._restore_if(overflow)
        return overflow

    def _restore_if(self, overflow):
        if overflow:
            self.forward_state.restore()

    def _close_window(self, grads, scale, overflow):
        grads = self._packed(self.overflow_detector.start(grads))
        overflow = self._conclude(grads, Tensor(1.0, mstype.float32), scale, overflow, ())
        self.accumulation.reset(overflow)
        return overflow

    def _conclude(self, grads, divisor, scale, overflow, saved_state):
        """Reduces the gradients, reaches the verdict (given what is known already), and obeys it."""
        if self.reducer_flag:
            # Which are not stacked then.
            grads = self._packed(self.grad_reducer(self._unpacked(grads)))
        overflow = self._verdict(grads, divisor, overflow)
        self._adjust_scale(scale, overflow)
        return self._update_or_undo(grads, overflow, saved_state)

    def _verdict(self, grads, divisor, overflow):
        norms_are_finite = self._measure(grads, divisor)
        if self._norms_tell:
            overflow = ops.logical_or(overflow, ops.logical_not(norms_are_finite))
        else:
            overflow = ops.logical_or(overflow, self.overflow_detector(gradients.flat(grads)))
        if self._agrees:
            # A sum, since MindSpore on CPU has no maximum; of floats, since a small integer type could wrap around.
            overflow = self._sum_of_ranks(overflow.astype(mstype.float32)) > 0.0
        return overflow

    def _measure(self, grads, divisor):
        """Measures the norms that are asked for. Returns whether all of them are finite."""
        finite = Tensor(True)
        for i, clipping in enumerate(self.clippings):
            if clipping.measures:
                finite = ops.logical_and(finite, clipping.measure(grads[i], divisor))
        return finite

    def _adjust_scale(self, scale, overflow):
        next_scale = self.loss_scale.next_scale(scale, overflow)
        if self._accumulates:
            # What was set by hand within the window is for the next one, as it is.
            present = self.loss_scale.scale_value
            next_scale = ops.select(ops.equal(present, scale), next_scale, present)
        ops.assign(self.loss_scale.scale_value, next_scale)

    def _update_or_undo(self, grads, overflow, saved_state):
        """The one branch. The verdict that it returns comes after all that the branch did."""
        if overflow:
            self.forward_state.restore(saved_state)
            done = self.step_counters.count_skipped(self._each_finite(grads))
        else:
            self._update(grads)
            done = self.step_counters.count_applied()
        return ops.depend(overflow, done)

    def _each_finite(self, grads):
        are_finite = ()
        for i, packing in enumerate(self._packings):
            are_finite += (gradients.each_finite(grads[i], packing),)
        return ops.concat(are_finite)

    def _update(self, grads):
        clipped = ()
        for i, clipping in enumerate(self.clippings):
            clipped += (clipping(grads[i]),)
        clipped = self._unpacked(clipped)
        if self._casts:
            clipped = gradients.cast_like(clipped, self.weights)
        self.optimizer(clipped)
        if self.after_update is not None:
            self.after_update()
        for moving_average in self.moving_averages:
            moving_average()
