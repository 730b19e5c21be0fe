"""The training cell for one network."""

from collections.abc import Sequence
from typing import Any, Optional, Union

from mindspore import Parameter, nn, ops

from ms_lossscale._arguments import AfterUpdate
from ms_lossscale._keywords import answers_keywords
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.function_network import Network, as_network
from ms_lossscale.loss_scale import AcceptedLossScale
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.names import name_prefix, names_of_states, own_loss_scale
from ms_lossscale.step.plan import StepPlan
from ms_lossscale.step.settings import check_settings, settings_among


class ScaledTrainOneStepCell(TrainingCell):
    """
    Trains one network with a loss scale. The cell itself divides the gradients by the scale, so any optimizer works.

    A step is a transaction. If nothing overflowed, neither a gradient nor anything that the forward writes, the whole
    update happens, also if the loss itself is not finite. Otherwise only the loss scale and the step counters change.
    Weights, optimizer state (and with it the learning-rate schedule), BatchNorm's moving statistics, what your own
    cells write in their forward, and moving averages all stay as they were.

    Args:
        network (Union[Cell, Callable]): Returns the loss, as :class:`mindspore.nn.WithLossCell` does. The loss may have
            any shape; its sum is what is trained, and a warning tells of it. Of a function, the Cells are held that it
            reaches: through its closure, its defaults, the globals and attributes that its code names, or the `self` of
            a method.
        optimizer (Cell): Any optimizer that does not divide by a loss scale of its own.
        loss_scale (Union[None, float, LossScale, ...]): A loss scale of this package; a number, which means a
            :class:`FixedLossScale`; None, which means no scaling and no check; or MindSpore's `FixedLossScaleManager`,
            `DynamicLossScaleManager`, `FixedLossScaleUpdateCell` or `DynamicLossScaleUpdateCell`, whose settings are
            taken over. Default: ``None`` .
        gradient_accumulation_steps (int): The number of calls whose gradients are averaged, in float32, for one update.
            The calls of such an accumulation cycle use one scale and are checked together at its end. The loss scale
            and the counters count a cycle as one step. Default: ``1`` .
        clip_norm (float, optional): The largest global norm of the unscaled gradients; ``float("inf")`` only measures
            it, for :meth:`TrainingCell.grad_norm`. Default: ``None`` .
        clip_value (float, optional): The largest absolute value of an unscaled gradient. Do not use it together with
            `clip_norm`. Default: ``None`` .
        ema_decay (float, optional): In (0, 1). Keeps the moving average `ema = decay * ema + (1 - decay) * weight`.
            Skipped steps do not move it. Default: ``None`` .
        has_aux (bool): Whether the network returns `(loss, *aux)`. `aux` are Tensors and not trained.
            Default: ``False`` .
        forward_state (Union[list, tuple]): Parameters, and Cells with all of theirs, that a skipped step restores
            besides: weights that the forward moves, frozen weights of MindSpore's layers, larger state, what MindSpore
            does not find. It restores by itself the moving statistics of MindSpore's layers, and the smallest
            Parameters without gradient and registered buffers, up to :math:`10^6` values in all.
            :meth:`forward_state_names` lists both. Default: ``()`` .
        gradient_transforms (Union[list[Cell], tuple[Cell]]): Cells that are applied to the unscaled float32 gradients,
            in the given order and once per step, before the norm is measured and the overflow is checked. Each one is
            called with a tuple of one gradient for each weight, in the order of `optimizer.parameters`, and returns a
            tuple of as many gradients, of the same shapes. A skipped step restores their own Parameters. Default:
            ``()`` .
        after_update (Union[Cell, Callable], optional): A Cell without inputs, or a method of a Cell without inputs
            (`ema.update`), that runs after each applied update. Default: ``None`` .
        overflow_detector (OverflowDetector, optional): Default: ``None`` , which picks the right one for the device:
            :class:`FloatStatusRegister` on an NPU in saturation mode, else :class:`FiniteGradients`.
        max_retries (int): How many times a call whose gradients overflowed runs again before its step is skipped. Each
            attempt uses the same inputs and the scale that the update rule gives; each overflow counts for it. A call
            runs again only if a lower scale can help. Default: ``0`` .
        weighted (bool): Whether the network returns `(loss, weight)`, or with `has_aux` `(loss, weight, *aux)`, where
            the loss is a sum over `weight` things, such as tokens: a number or a Tensor of shape :math:`()`, which is
            not trained. The step then trains the sum of all losses divided by the sum of all weights, over the calls
            of an accumulation cycle and over the ranks; where overflow is checked, never by one that is negative,
            infinite or NaN. Weights are added up in float32, exactly up to :math:`2^{24}`. With `gradients_reduced`,
            the gradients must become their mean over the ranks.
            Default: ``False`` .
        skip_conditions (Union[list[SkipCondition], tuple[SkipCondition]]): What may skip a step that did not overflow,
            such as a :class:`NormSpike`. Default: ``()`` .
        gradients_reduced (Union[bool, str]): Whether something else reduces the gradients across ranks: hooks on the
            weights, `DistributedDataParallel`, `fully_shard`. True, or the name of a communication group. This cell
            then reduces none, but all ranks (of the group) agree on whether the step overflowed. Default: ``False`` .
        drop_overflowed_calls (bool): Whether a call of an accumulation cycle whose gradients are not finite is dropped:
            it is undone, and the step is the mean over the other calls, by weight if they have weights. The step is
            skipped only if all calls were dropped, or their sum overflows. The update rule sees an overflow at the
            cycle's end if any call overflowed. `counters()` then has `dropped_calls`. Default: ``False`` .
        name (str, optional): Begins, with a dot, the names of all Parameters besides those of the network and of
            `after_update`. Two cells in one compiled function need different ones. Default: ``None`` .

    Inputs:
        - **\\*inputs** (tuple) - The inputs of the network.

    Outputs:
        Tuple of three, or with `has_aux` four, the values of this step.

        - **loss** (Tensor) - The loss as the network gave it, unscaled; if it is `weighted`, divided by its weight.
        - **overflow** (Tensor) - Whether the step was skipped, bool of shape :math:`()`; before the end of an
          accumulation cycle, whether it is already known that the cycle will be skipped, with `drop_overflowed_calls`
          whether the call was dropped.
        - **loss_scale** (Tensor) - The scale that this step used, float32 of shape :math:`()`.
        - **aux** (tuple) - With `has_aux`, what the network returned besides the loss.

    Raises:
        TypeError: If an argument has a wrong type, or, in the first step, if the network does not return a Tensor as
            its loss or a gradient transform does not return a tuple.
        ValueError: If the network returns several values, and the first one looks like an image and not like a loss. If
            a number is out of range, `clip_norm` and `clip_value` are both given, the optimizer has no parameters, has
            a loss scale of its own or owns parameters that the network does not have, or two parameters share a name.
            If `parallel_mode` is ``"semi_auto_parallel"`` or ``"auto_parallel"`` , also for pipeline stages,
            accumulation, `ema_decay` or `weighted`.
        RuntimeError: If `parallel_mode` is not ``"stand_alone"`` and communication is not initialised.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
        >>> network = nn.Dense(4, 1)
        >>> optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=1e-3)
        >>> cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, DynamicLossScale())
        >>> x, y = Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones((2, 1), np.float32))
        >>> loss, overflow, loss_scale = cell(x, y)
        >>> print(overflow, loss_scale)
        False 65536.0
        >>> cell.counters()
        {'applied_steps': 1, 'skipped_steps': 0, 'consecutive_skipped_steps': 0}
    """

    _several_networks = False

    @answers_keywords(loss_fn="The network returns the loss: nn.WithLossCell(network, loss_fn).")
    def __init__(
        self,
        network: Network,
        optimizer: nn.Cell,
        loss_scale: AcceptedLossScale = None,
        *,
        gradient_accumulation_steps: int = 1,
        clip_norm: Optional[float] = None,
        clip_value: Optional[float] = None,
        ema_decay: Optional[float] = None,
        has_aux: bool = False,
        forward_state: Sequence[Union[Parameter, nn.Cell]] = (),
        gradient_transforms: Sequence[Any] = (),
        after_update: Optional[AfterUpdate] = None,
        overflow_detector: Optional[OverflowDetector] = None,
        max_retries: int = 0,
        weighted: bool = False,
        skip_conditions: Sequence[Any] = (),
        gradients_reduced: Union[bool, str] = False,
        drop_overflowed_calls: bool = False,
        name: Optional[str] = None,
    ) -> None:
        owner = type(self).__name__
        prefix = name_prefix(owner, name)
        settings = check_settings(owner, 1, **settings_among(locals()))
        networks = (as_network(owner, "network", network),)
        loss_scales = [own_loss_scale(owner, loss_scale, prefix)]
        plan = StepPlan(owner, networks, (optimizer,), loss_scales, settings, name_prefix=prefix)
        super().__init__(networks, plan.optimizers, [plan])

    def _names_in_holders(self):
        return names_of_states(self.optimizer)

    def construct(self, *inputs):
        # Indexed, since graph mode warns of a name that nothing uses.
        results = self._steps[0](*ops.depend(inputs, self._all_parameters))
        output = (results[0][0], results[2], results[3][0])
        return (*output, results[1][0]) if self._have_aux[0] else output
