"""The training cell for several networks that step one after the other."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any, Optional, Union

from mindspore import GRAPH_MODE, Parameter, Tensor, get_context, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._arguments import AfterUpdate, OneOrEach, check_cells, check_one_each, check_positive_int, one_each
from ms_lossscale._keywords import answers_keywords
from ms_lossscale._mindspore.graphs import is_compiling
from ms_lossscale.cells.training_cell import TrainingCell, or_none
from ms_lossscale.cells.turns import Turns
from ms_lossscale.function_network import Network, as_networks
from ms_lossscale.input_gradient import holds_input_gradient
from ms_lossscale.loss_scale import AcceptedLossScale, LossScale
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.forward_backward import inputs_of
from ms_lossscale.step.forward_state import share_state
from ms_lossscale.step.names import name_prefix, network_prefix, own_loss_scales
from ms_lossscale.step.plan import StepPlan
from ms_lossscale.step.settings import check_settings_of_steps, settings_among
from ms_lossscale.step.shared_averages import share_averages


class AlternatingTrainOneStepCell(TrainingCell):
    """
    Trains several networks one after the other. Each completes its step, and the next one sees its new weights.

    Each network's step is a transaction with its own loss scale, overflow check and counters. On an NPU in saturation
    mode, the device's only status register is cleared before and read after each step, in one compiled graph, so each
    check sees only its own network.

    Args:
        networks (list[Cell]): Loss cells, one for each optimizer.
        optimizers (list[Cell]): Optimizers that do not divide by a loss scale of their own; several networks may have
            the same one. The names of their states get the prefixes ``optimizer_0.`` , ``optimizer_1.`` and so on, so
            that a checkpoint keeps all of them.
        loss_scale (Union[None, float, LossScale, list, ...]): A list with one loss scale for each network, or one that
            is copied for each, in the forms that :class:`ScaledTrainOneStepCell` takes. Default: ``None`` .
        every (Union[list[int], tuple[int]], optional): For each network an integer k >= 1: the network takes part in
            the calls k, 2k, 3k, ... of this cell; when accumulating, in these accumulation cycles. With the networks
            ``[critic, generator]`` , ``(1, 5)`` trains the generator in every 5th call only. Default: ``None`` , in
            every call.
        network_inputs (list[tuple[int]], optional): For each network, the positions of the inputs that it takes, for
            example ``[(0, 1), (1,)]`` . Default: ``None`` , all networks take all inputs.
        gradient_accumulation_steps (int): As for :class:`ScaledTrainOneStepCell`. Default: ``1`` .
        clip_norm (Union[float, list], optional): As for :class:`ScaledTrainOneStepCell`, over the gradients of one
            optimizer, or a list with one (or None) for each network. Default: ``None`` .
        clip_value (Union[float, list], optional): Likewise. Default: ``None`` .
        ema_decay (Union[float, list], optional): Likewise. Default: ``None`` .
        has_aux (Union[bool, list[bool]]): Whether each network returns `(loss, *aux)`, or a list with one entry for
            each. A network with aux takes part in every call. Default: ``False`` .
        forward_state (Union[list, tuple]): As for :class:`ScaledTrainOneStepCell`.
            Default: ``()`` .
        gradient_transforms (Union[list, tuple]): As for :class:`ScaledTrainOneStepCell`: Cells that are applied to the
            gradients of each network separately, or a list with a list of Cells for each network. Default: ``()`` .
        after_update (Union[Cell, Callable, list], optional): A Cell without inputs, or a method of a Cell without
            inputs (`ema.update`), that runs after each applied update of each network; or a list with one (or None) for
            each. Default: ``None`` .
        overflow_detector (OverflowDetector, optional): As for :class:`ScaledTrainOneStepCell`. Default: ``None`` .
        max_retries (int): As for :class:`ScaledTrainOneStepCell`, for each network separately. Default: ``0`` .
        weighted (Union[bool, list[bool]]): As for :class:`ScaledTrainOneStepCell`, or a list with one entry for each
            network. Default: ``False`` .
        skip_conditions (Union[list, tuple]): As for :class:`ScaledTrainOneStepCell`: SkipConditions that are copied for
            each network, or a list with a list of them for each network. Default: ``()`` .
        gradients_reduced (Union[bool, str]): As for :class:`ScaledTrainOneStepCell`. Default: ``False`` .
        drop_overflowed_calls (bool): As for :class:`ScaledTrainOneStepCell`. Default: ``False`` .
        name (str, optional): As for :class:`ScaledTrainOneStepCell`. Default: ``None`` .

    Inputs:
        - **\\*inputs** (tuple) - The inputs of the networks.

    Outputs:
        Tuple of four, or with `has_aux` five, the values of this call. If a network does not take part, its entries are
        its last loss, False, and its present scale. The last loss is that of its last turn that was not skipped, and 0
        before the first one.

        - **loss** (Tensor) - The sum of the losses, unscaled, float32 of shape :math:`()`, also of networks that do not
          take part.
        - **overflow** (Tensor) - For each network, whether its step was skipped, bool of shape :math:`(N,)`.
        - **loss_scale** (Tensor) - For each network, the scale that it used, float32 of shape :math:`(N,)`.
        - **losses** (Tensor) - The losses, float32 of shape :math:`(N,)`; a non-scalar loss enters as its sum.
        - **auxes** (tuple) - With `has_aux`, a tuple for each network of what it returned besides the loss; `()` if it
          has no aux.

    Raises:
        TypeError: As for :class:`ScaledTrainOneStepCell`.
        ValueError: As for :class:`ScaledTrainOneStepCell`, or if there are not as many networks as optimizers, two
            optimizers own the same parameter, or `network_inputs`, `every` or a list does not fit.
        RuntimeError: As for :class:`ScaledTrainOneStepCell`.

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

    _each_decides = _each_has_scale = True

    @answers_keywords()
    def __init__(
        self,
        networks: Union[Sequence[Network], nn.CellList],
        optimizers: Union[Sequence[nn.Cell], nn.CellList],
        loss_scale: OneOrEach[AcceptedLossScale] = None,
        *,
        every: Optional[Sequence[int]] = None,
        network_inputs: Optional[Sequence[Sequence[int]]] = None,
        gradient_accumulation_steps: int = 1,
        clip_norm: OneOrEach[Optional[float]] = None,
        clip_value: OneOrEach[Optional[float]] = None,
        ema_decay: OneOrEach[Optional[float]] = None,
        has_aux: OneOrEach[bool] = False,
        forward_state: Sequence[Union[Parameter, nn.Cell]] = (),
        gradient_transforms: Sequence[Any] = (),
        after_update: OneOrEach[Optional[AfterUpdate]] = None,
        overflow_detector: Optional[OverflowDetector] = None,
        max_retries: int = 0,
        weighted: OneOrEach[bool] = False,
        skip_conditions: Sequence[Any] = (),
        gradients_reduced: Union[bool, str] = False,
        drop_overflowed_calls: bool = False,
        name: Optional[str] = None,
    ) -> None:
        owner = type(self).__name__
        prefix = name_prefix(owner, name)
        networks = as_networks(owner, "networks", networks)
        optimizers = check_cells(owner, "optimizers", optimizers)
        check_one_each(owner, networks, optimizers)
        of_steps = check_settings_of_steps(owner, len(networks), **settings_among(locals()))
        loss_scales = _loss_scales(owner, loss_scale, (*networks, *optimizers), of_steps, prefix)
        plans = []
        for i, (network, optimizer, scale, of_step) in enumerate(zip(networks, optimizers, loss_scales, of_steps)):
            of_network = {"name_prefix": prefix, "step_prefix": network_prefix(i), "number": i, "takes_turns": True}
            plans.append(StepPlan(owner, (network,), (optimizer,), [scale], of_step, **of_network))
        super().__init__(networks, optimizers, plans, network_inputs)
        if every is not None:
            self.set_every(every)

    def _add_parts(self, steps, settings, prefix):
        self._turns = Turns(len(steps), settings[0].gradient_accumulation_steps, prefix)
        transactions = [step.transaction for step in steps]
        share_state([transaction.forward_state for transaction in transactions])
        share_averages(self._owner, transactions, [of_step.ema_decay[0] for of_step in settings])
        # What the steps of the present call have returned in PyNative mode, by their numbers: if a later network
        # raises, the next call goes on behind them.
        self._results = {}
        # Whether the last call did not come to its end, or what was loaded may be from within such a one.
        self._may_be_within_call = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            output = super().__call__(*args, **kwargs)
        except BaseException:
            self._stop_within_call()
            raise
        self._begin_anew()
        return output

    def _before_step(self, inputs, keywords=()):
        super()._before_step(inputs, keywords)
        if self._may_be_within_call:
            self._go_on_within_call()

    def _stop_within_call(self):
        """Keeps what the networks have returned that made their part of a call before a later one raised."""
        if self._results:
            self._may_be_within_call = True
            self._turns.stop({i: _values(results)[:2] for i, results in self._results.items()})

    def _begin_anew(self):
        self._results.clear()
        if self._may_be_within_call:
            self._may_be_within_call = False
            self._turns.begin_anew()

    def _go_on_within_call(self):
        """Has the networks take no part that had made theirs of the last call, or of that in which a file was saved."""
        done = int(self._turns.next_network.asnumpy())
        if done and get_context("mode") == GRAPH_MODE:
            raise RuntimeError(
                f"For '{self._owner}', the present state is from within a call in which network {done} raised, which "
                f"only PyNative mode can go on with. Go on in PYNATIVE_MODE, or call discard()."
            )
        if self._results:
            return
        losses = ops.unstack(self._turns.present_losses())
        for i in range(done):  # A slice of a CellList would rename the Parameters.
            transaction = self._steps[i].transaction
            scale = prim.deepcopy(transaction.scales.loss_scales[0].scale_value)
            was_skipped = (
                not transaction.has_begun() and transaction.counters.as_dict()["consecutive_skipped_steps"] > 0
            )
            self._results[i] = ((losses[i],), ((),), Tensor(was_skipped), (scale,))

    def _turns_taken(self):
        return [self._turns]

    def _after_loading(self):
        super()._after_loading()
        self._results.clear()
        self._may_be_within_call = True

    def steps_made(self) -> int:
        return int(self._turns.cycles.asnumpy())

    def construct(self, *inputs):
        inputs = ops.depend(inputs, self._all_parameters)
        take_part = self._turns.begin_call()
        last_losses = ops.unstack(self._turns.last_losses)
        losses, overflows, loss_scales, auxes = (), (), (), ()
        for i in range(len(self._steps)):
            inputs_of_network = inputs_of(self._owner, i, self.network_inputs, inputs)
            if self._have_aux[i]:
                results = self._results_of(i, inputs_of_network)
                loss, overflow, loss_scale = _values(results)
                auxes = (*auxes, or_none(results[1][0]))
            else:
                loss, overflow, loss_scale = self._step_in_turn(i, take_part[i], last_losses[i], inputs_of_network)
                auxes = (*auxes, None)
            losses = (*losses, loss)
            overflows = (*overflows, overflow)
            loss_scales = (*loss_scales, loss_scale)
            # The next network's forward must wait for this one's update.
            inputs = ops.depend(inputs, overflow)
        losses = prim.stack(losses)
        overflows = prim.stack(overflows)
        self._turns.end_call(losses, overflows)
        if not is_compiling():
            self._begin_anew()
        output = (prim.reduce_sum(losses), overflows, prim.stack(loss_scales), losses)
        return (*output, auxes) if self._has_aux else output

    def _results_of(self, i, inputs):
        """Runs the step of a network. Returns what it returns."""
        return self._steps[i](*inputs) if is_compiling() else self._results_of_call(i, inputs)

    def _results_of_call(self, i, inputs):
        """Does so, in Python, unless the present call has before."""
        if i not in self._results:
            self._results[i] = self._steps[i](*inputs)
        return self._results[i]

    def _step_in_turn(self, i, takes_part, last_loss, inputs):
        if takes_part:
            loss, overflow, loss_scale = _values(self._results_of(i, inputs))
        else:
            loss = last_loss
            loss_scale = prim.deepcopy(self._steps[i].transaction.scales.loss_scales[0].scale_value)
            overflow = gradients.never(loss_scale)
        return loss, overflow, loss_scale

    def set_every(self, every: Sequence[int]) -> None:
        """
        Sets in which calls each network takes part. It applies from the next call on; when accumulating, from the next
        accumulation cycle on.

        Args:
            every (Union[list[int], tuple[int]]): For each network an integer k >= 1: the network takes part in the
                calls (when accumulating, in the accumulation cycles) k, 2k, 3k, ..., counted from the first one of the
                cell.

        Raises:
            TypeError: If `every` is not a list or tuple of integers.
            ValueError: If it does not have one entry for each network, an entry is below 1, or that of a network with
                aux is not 1: in a call without it there would be no aux to return.
            RuntimeError: If the next call goes on with one in which a network raised.
        """
        owner = type(self).__name__
        if not isinstance(every, (list, tuple)):
            raise TypeError(f"For '{owner}', the argument 'every' must be a list or tuple, but got {every!r}.")
        every = one_each(owner, "every", every, len(self._steps))
        for i, (k, has_aux) in enumerate(zip(every, self._have_aux)):
            if check_positive_int(owner, f"every[{i}]", k) != 1 and has_aux:
                raise ValueError(
                    f"For '{owner}', the argument 'every' must be 1 for a network with aux, since one that does not "
                    f"take part has none to return, but got {k} for network {i}."
                )
        if self._results:
            raise RuntimeError(
                f"For '{owner}', 'set_every()' must come between two calls, but the last one is to go on with network "
                f"{max(self._results) + 1}, which raised. Call the cell again before, or discard()."
            )
        ops.assign(self._turns.every, Tensor(every, mstype.int32))


def _values(results):
    """Returns the loss, the overflow and the scale of a network's step."""
    return gradients.sums(results[0])[0], results[2], results[3][0]


def _loss_scales(owner, loss_scale, cells, of_steps, prefix):
    """Returns the loss scale of each network: its own, or a copy of the one that is given for all."""
    if not isinstance(loss_scale, (list, tuple)):
        if isinstance(loss_scale, LossScale):
            _check_held_by_none(owner, loss_scale, cells, of_steps)
        loss_scale = [copy.deepcopy(loss_scale) for _ in of_steps]
    return own_loss_scales(owner, loss_scale, len(of_steps), prefix)


def _check_held_by_none(owner, loss_scale, cells, settings):
    """Raises if another part of the cell holds a loss scale that is copied: it would follow none of the copies."""
    parts = list(cells)
    for of_step in settings:
        parts += [of_step.after_update, of_step.overflow_detector, *of_step.skip_conditions]
        parts += itertools.chain(*of_step.gradient_transforms)
    parts = [part for part in parts if part is not None]
    held = {id(parameter) for part in parts for parameter in part.get_parameters()}
    is_held = any(id(parameter) in held for parameter in loss_scale.get_parameters())
    if is_held or holds_input_gradient(cells, loss_scale):
        raise ValueError(
            f"For '{owner}', the argument 'loss_scale' is copied for each network, but another part of the cell, an "
            f"InputGradient say, holds it, too, and would follow none of the copies. Pass a list with a loss scale for "
            f"each network, and let each share that of its own."
        )
