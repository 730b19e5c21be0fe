"""The training cell for several networks that step one after the other."""

import copy

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._check import check_cells, check_one_each, check_positive_int, check_scale, describe, one_each
from ms_lossscale.cells.measurements import Measurements
from ms_lossscale.cells.rank_agreement import RankAgreement
from ms_lossscale.step.network_inputs import check_network_inputs, inputs_of
from ms_lossscale.step.optimizers import Optimizers, check_optimizers, prefix_states
from ms_lossscale.step.parameter_names import check_unique_names
from ms_lossscale.step.transaction import Transaction


class AlternatingTrainOneStepCell(Measurements, RankAgreement):
    """
    Trains several networks one after the other: each makes its whole step, and the next one sees its new weights.

    Each network's step is a transaction with its own loss scale, its own verdict and its own counters. On an NPU in
    saturation mode the device's one status register is cleared before and read after each of them, in one compiled
    graph, so that each verdict is about its own network only.

    Args:
        networks (list[Cell]): Loss cells, one for each optimizer.
        optimizers (list[Cell]): Optimizers that do not divide by a loss scale of their own. The names of their states
            get the prefixes ``optimizer_0.`` , ``optimizer_1.`` and so on, so that a checkpoint keeps all of them.
        loss_scale (Union[None, float, LossScale, list, ...]): A list with one for each network, or one that is copied
            for each; in the forms that :class:`ScaledTrainOneStepCell` takes. Default: ``None`` .
        every (Union[list[int], tuple[int]], optional): For each network, k >= 1: it takes part in the calls (when
            accumulating: the windows) k, 2k, 3k, ... of this cell. ``(5, 1)`` trains network 1 five times as often.
            Default: ``None`` , in every call.
        network_inputs (list[tuple[int]], optional): For each network, the positions of the inputs that it takes,
            ``[(1,), (0, 1)]`` say. Default: ``None`` , all networks take all inputs.
        gradient_accumulation_steps (int): As for :class:`ScaledTrainOneStepCell`. Default: ``1`` .
        clip_norm (Union[float, list], optional): As for :class:`ScaledTrainOneStepCell`, over the gradients of one
            optimizer, or a list with one (or None) for each network. Default: ``None`` .
        clip_value (Union[float, list], optional): Likewise. Default: ``None`` .
        ema_decay (Union[float, list], optional): Likewise. Default: ``None`` .
        has_aux (bool): Whether each network returns `(loss, *aux)`; not together with `every`. Default: ``False`` .
        forward_state (Union[list[Parameter], tuple[Parameter]]): As for :class:`ScaledTrainOneStepCell`.
            Default: ``()`` .
        after_update (Union[Cell, list[Cell]], optional): A Cell without inputs that runs after each applied update of
            each network, or a list with one (or None) for each. Default: ``None`` .
        overflow_detector (OverflowDetector, optional): As for :class:`ScaledTrainOneStepCell`. Default: ``None`` .

    Inputs:
        - **\\*inputs** (tuple) - The inputs of the networks.

    Outputs:
        Tuple of four, or with `has_aux` five, the values of this call. The entries of a network that does not take part
        are its last loss (0 before the first), False, and its present scale.

        - **loss** (Tensor) - The sum of the losses, unscaled, float32 of shape :math:`()`.
        - **overflow** (Tensor) - For each network whether its step was skipped, bool of shape :math:`(N,)`.
        - **loss_scale** (Tensor) - For each network the scale that it used, float32 of shape :math:`(N,)`.
        - **losses** (Tensor) - The losses, float32 of shape :math:`(N,)`; a non-scalar loss enters as its sum.
        - **auxes** (tuple) - With `has_aux`, for each network the tuple of what it returned besides the loss.

    Raises:
        TypeError: If an argument has a wrong type, or, in the first step, if a network returns something else.
        ValueError: If there are not as many networks as optimizers, two optimizers own one parameter, an optimizer
            owns a parameter of none of the networks or has a loss scale of its own, two parameters share a name, or
            `network_inputs`, `every` or a list does not fit.
        RuntimeError: If `parallel_mode` is ``"data_parallel"`` or ``"hybrid_parallel"`` , but communication is not
            initialised.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale
        >>> networks = [nn.Dense(4, 1), nn.Dense(4, 1)]
        >>> for i, network in enumerate(networks):
        ...     network.update_parameters_name(f"{i}.")
        >>> cell = AlternatingTrainOneStepCell(
        ...     [nn.WithLossCell(network, nn.MSELoss()) for network in networks],
        ...     [nn.Adam(network.trainable_params()) for network in networks],
        ...     DynamicLossScale(),
        ...     every=(1, 2),
        ... )
        >>> x, y = Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones((2, 1), np.float32))
        >>> loss, overflow, loss_scale, losses = cell(x, y)
        >>> print(overflow, loss_scale)
        [False False] [65536. 65536.]
        >>> [counters["applied_steps"] for counters in cell.counters()]
        [1, 0]
    """

    def __init__(
        self,
        networks,
        optimizers,
        loss_scale=None,
        *,
        every=None,
        network_inputs=None,
        gradient_accumulation_steps=1,
        clip_norm=None,
        clip_value=None,
        ema_decay=None,
        has_aux=False,
        forward_state=(),
        after_update=None,
        overflow_detector=None,
    ):
        owner = type(self).__name__
        networks = check_cells(owner, "networks", networks)
        optimizers = check_cells(owner, "optimizers", optimizers)
        check_one_each(owner, networks, optimizers)
        check_optimizers(owner, optimizers, networks)
        prefix_states(optimizers)
        super().__init__(owner, networks, Optimizers(optimizers))
        # Each phase reduces its own gradients.
        self.grad_reducer = nn.Identity()
        count = len(networks)
        loss_scales = self._loss_scales(loss_scale, count)
        after_updates = one_each(owner, "after_update", after_update, count)
        clip_norms = one_each(owner, "clip_norm", clip_norm, count)
        clip_values = one_each(owner, "clip_value", clip_value, count)
        ema_decays = one_each(owner, "ema_decay", ema_decay, count)
        self.phases = nn.CellList(
            [
                Transaction(
                    owner,
                    networks[i : i + 1],
                    optimizers[i : i + 1],
                    loss_scales[i],
                    prefix=f"network_{i}.",
                    gradient_accumulation_steps=gradient_accumulation_steps,
                    clip_norms=clip_norms[i : i + 1],
                    clip_values=clip_values[i : i + 1],
                    ema_decays=ema_decays[i : i + 1],
                    has_aux=has_aux,
                    forward_state=forward_state,
                    after_update=after_updates[i],
                    overflow_detector=overflow_detector,
                )
                for i in range(count)
            ],
            auto_prefix=False,
        )
        self.network_inputs = check_network_inputs(owner, network_inputs, networks)
        self._has_aux = has_aux
        self._steps = int(gradient_accumulation_steps)
        # Windows that have ended, and calls of the present one.
        self.windows = self._state(np.int32(0), "windows")
        self.calls = self._state(np.int32(0), "calls")
        self.every = self._state(np.ones(count, np.int32), "every")
        # A network takes part in whole windows, also if `every` is set within one.
        self.window_every = self._state(np.ones(count, np.int32), "window_every")
        self.last_losses = self._state(np.zeros(count, np.float32), "last_losses")
        if every is not None:
            self.set_every(every)
        check_unique_names(owner, self.get_parameters())

    def rank_settings(self):
        """What was passed to the cell and must be the same on all ranks."""
        settings = {"networks": len(self.phases)}
        for phase in self.phases:
            settings.update(phase.rank_settings())
        return settings

    def rank_state(self):
        """The small Parameters that have the same values on all ranks."""
        state = [parameter for phase in self.phases for parameter in phase.rank_state()]
        return [*state, self.windows, self.calls, self.every, self.window_every]

    @staticmethod
    def _state(value, name):
        return Parameter(Tensor(value), name=f"alternation.{name}", requires_grad=False)

    def _loss_scales(self, loss_scale, count):
        owner = type(self).__name__
        loss_scales = one_each(owner, "loss_scale", loss_scale, count)
        if not isinstance(loss_scale, (list, tuple)):
            return [copy.deepcopy(each) for each in loss_scales]
        cells = [id(each) for each in loss_scales if isinstance(each, nn.Cell)]
        if len(set(cells)) < len(cells):
            raise ValueError(
                f"For '{owner}', the argument 'loss_scale' must not hold the same Cell twice, since each network has "
                f"its own. Pass one that is not in a list: it is copied for each network."
            )
        return loss_scales

    def construct(self, *inputs):
        window = self.windows + 1
        ops.assign(self.window_every, ops.select(self.calls == 0, self.every, self.window_every))
        every, last_losses = ops.unstack(self.window_every), ops.unstack(self.last_losses)
        losses, overflows, loss_scales, auxes = (), (), (), ()
        for i, phase in enumerate(self.phases):
            its_inputs = inputs_of(i, self.network_inputs, inputs)
            if self._has_aux:
                step = phase.step(*its_inputs)
                loss, overflow, loss_scale = self._values(step)
                auxes += (step[1][0],)
            else:
                loss, overflow, loss_scale = self._run_in_turn(
                    window % every[i] == 0, last_losses[i], phase, its_inputs
                )
            losses, overflows, loss_scales = losses + (loss,), overflows + (overflow,), loss_scales + (loss_scale,)
            # The next network's forward comes after all that this one's update did.
            inputs = ops.depend(inputs, overflow)
        losses = ops.stack(losses)
        ops.assign(self.last_losses, losses)
        self._count_call(window)
        output = (ops.ReduceSum()(losses), ops.stack(overflows), ops.stack(loss_scales), losses)
        if self._has_aux:
            return (*output, auxes)
        return output

    def _count_call(self, window):
        calls = self.calls + 1
        is_last = calls >= self._steps
        ops.assign(self.windows, ops.select(is_last, window, self.windows))
        ops.assign(self.calls, ops.select(is_last, 0, calls))

    @staticmethod
    def _values(step):
        return gradients.sums(step[0])[0], step[2], step[3]

    def _run_in_turn(self, takes_part, last_loss, phase, inputs):
        if takes_part:
            loss, overflow, loss_scale = self._values(phase.step(*inputs))
        else:
            loss = last_loss
            overflow = Tensor(False)
            loss_scale = gradients.copy(phase.loss_scale.scale_value)
        return loss, overflow, loss_scale

    def set_every(self, every):
        """
        Sets in which calls each network takes part, from the next call (when accumulating: the next window) on.

        Args:
            every (Union[list[int], tuple[int]]): For each network, k >= 1: it takes part in the calls (when
                accumulating: the windows) k, 2k, 3k, ..., counted from the first one of the cell.

        Raises:
            TypeError: If `every` is not a list or tuple of integers.
            ValueError: If it has not one entry for each network, one is below 1, or the cell has aux, which a network
                that does not take part could not give.
        """
        owner = type(self).__name__
        if not isinstance(every, (list, tuple)):
            raise TypeError(f"For '{owner}', the argument 'every' must be a list or tuple, but got {describe(every)}.")
        every = [
            check_positive_int(owner, f"every[{i}]", k)
            for i, k in enumerate(one_each(owner, "every", every, len(self.phases)))
        ]
        if self._has_aux and set(every) != {1}:
            raise ValueError(
                f"For '{owner}', the argument 'every' must be None or all 1 with has_aux=True, since a network that "
                f"does not take part has no aux to return, but got {every}."
            )
        ops.assign(self.every, Tensor(every, mstype.int32))

    def get_loss_scale(self):
        """
        Reads the loss scales.

        Returns:
            list[float], for each network the scale that its next step will use.
        """
        return [phase.get_loss_scale() for phase in self.phases]

    def set_loss_scale(self, value):
        """
        Sets the loss scales by hand, between two calls; their laws go on from there.

        Args:
            value (Union[float, list[float]]): The new scale for all networks or for each, finite numbers > 0.

        Raises:
            TypeError: If a value is not a number.
            ValueError: If a value is not finite or not > 0, or a list has not one entry for each network.
        """
        owner = f"{type(self).__name__}.set_loss_scale"
        # All of them are checked before the first is set.
        values = [check_scale(owner, "value", each) for each in one_each(owner, "value", value, len(self.phases))]
        for phase, its_value in zip(self.phases, values):
            phase.set_loss_scale(its_value)

    def counters(self):
        """
        Reads how many steps of each network were applied and skipped.

        Returns:
            list[dict], each with the ints `applied_steps`, `skipped_steps` and `consecutive_skipped_steps`.
        """
        return [phase.counters() for phase in self.phases]

    def overflowed_parameters(self):
        """
        Reads which gradients were not finite in the last step of each network that was skipped. Training itself never
        waits for it.

        Returns:
            list[str], the names of their parameters, of all networks. Those of a network none of whose steps was
            skipped are not in it, nor what only an NPU's register told of, as in saturation mode.
        """
        return [name for phase in self.phases for name in phase.overflowed_parameters()]

    def flush(self):
        """
        Ends a partial accumulation window: each network that takes part averages over the calls that the window really
        had, and updates or skips, in order.

        Does nothing without accumulation, or at the beginning of a window.
        """
        if self.calls.asnumpy() > 0:
            for phase in self.phases:
                phase.flush()
            ops.assign(self.windows, self.windows + 1)
            ops.assign(self.calls, Tensor(0, mstype.int32))

    def _clippings(self):
        return [clipping for phase in self.phases for clipping in phase.clippings]

    def _moving_averages(self):
        return [moving_average for phase in self.phases for moving_average in phase.moving_averages]
