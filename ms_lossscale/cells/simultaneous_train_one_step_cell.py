"""The training cell for several networks that share one overflow check and one update."""

from collections.abc import Sequence
from typing import Any, Optional, Union

from mindspore import Parameter, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._arguments import AfterUpdate, OneOrEach, check_bool, check_cells, check_one_each
from ms_lossscale._keywords import answers_keywords
from ms_lossscale.cells.training_cell import TrainingCell, or_none
from ms_lossscale.function_network import Network, as_network, as_networks
from ms_lossscale.loss_scale import AcceptedLossScale
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.names import name_prefix, own_loss_scales
from ms_lossscale.step.plan import StepPlan
from ms_lossscale.step.settings import check_settings, settings_among


class SimultaneousTrainOneStepCell(TrainingCell):
    """
    Trains several networks, such as the two of a GAN, with one overflow check and one conditional update.

    All losses and gradients are computed at the same weights. Then all optimizers step. But if any gradient of any
    network overflowed, or anything that a forward writes, none of them steps, and only the loss scale and the step
    counters change. On an NPU in saturation mode, this cell never attributes an overflow to the wrong network: it reads
    the device's only status register once, after all gradients.

    Loss i trains only the parameters of optimizer i, even if the networks are nested in each other.

    Args:
        networks (Union[list[Cell], Cell]): A list of loss cells, one for each optimizer; or one cell that returns a
            tuple of losses, one for each optimizer, so that shared work (the generator's output) is done once. Such a
            cell is compiled in PyNative mode, too.
        optimizers (list[Cell]): Optimizers that do not divide by a loss scale of their own. The names of their states
            get the prefixes ``optimizer_0.`` , ``optimizer_1.`` and so on, so that a checkpoint keeps all of them.
        loss_scale (Union[None, float, LossScale, list, ...]): As for :class:`ScaledTrainOneStepCell`: one that all
            networks share; or a list with one for each, all with the same `drop_overflow_update`. In a step that
            overflowed, only the scales of networks whose gradients are not finite back off. If a status register or an
            overflow detector of your own found the overflow, all of them do. Default: ``None`` .
        network_inputs (list[tuple[int]], optional): For each network, the positions of the inputs that it takes, for
            example ``[(0, 1), (1,)]`` . Default: ``None`` , all networks take all inputs.
        gradient_accumulation_steps (int): As for :class:`ScaledTrainOneStepCell`. Default: ``1`` .
        clip_norm (Union[float, list], optional): As for :class:`ScaledTrainOneStepCell`, over the gradients of one
            optimizer, or a list with one (or None) for each network. Default: ``None`` .
        clip_value (Union[float, list], optional): Likewise. Default: ``None`` .
        ema_decay (Union[float, list], optional): Likewise. Default: ``None`` .
        has_aux (Union[bool, list[bool]]): Whether each network returns `(loss, *aux)`, or a list with one entry for
            each. If one cell returns all losses, whether it returns `(*losses, *aux)`. Default: ``False`` .
        forward_state (Union[list, tuple]): As for :class:`ScaledTrainOneStepCell`.
            Default: ``()`` .
        gradient_transforms (Union[list, tuple]): As for :class:`ScaledTrainOneStepCell`: Cells that are applied to the
            gradients of each network separately, or a list with a list of Cells for each network. Default: ``()`` .
        after_update (Union[Cell, Callable], optional): A Cell without inputs, or a method of a Cell without inputs
            (`ema.update`), that runs after each applied update. Default: ``None`` .
        overflow_detector (OverflowDetector, optional): As for :class:`ScaledTrainOneStepCell`. Default: ``None`` .
        max_retries (int): As for :class:`ScaledTrainOneStepCell`. Default: ``0`` .
        weighted (Union[bool, list[bool]]): As for :class:`ScaledTrainOneStepCell`, or a list with one entry for each
            network. Not for one network that returns all losses. Default: ``False`` .
        skip_conditions (Union[list[SkipCondition], tuple[SkipCondition]]): As for :class:`ScaledTrainOneStepCell`.
            They look at the sum of the losses, and at the norm of all gradients together. Default: ``()`` .
        gradients_reduced (Union[bool, str]): As for :class:`ScaledTrainOneStepCell`. Default: ``False`` .
        drop_overflowed_calls (bool): As for :class:`ScaledTrainOneStepCell`. Default: ``False`` .
        name (str, optional): As for :class:`ScaledTrainOneStepCell`. Default: ``None`` .

    Inputs:
        - **\\*inputs** (tuple) - The inputs of the networks.

    Outputs:
        Tuple of four, or with `has_aux` five, the values of this step.

        - **loss** (Tensor) - The sum of the losses, unscaled, float32 of shape :math:`()`.
        - **overflow** (Tensor) - Whether the step was skipped, bool of shape :math:`()`.
        - **loss_scale** (Tensor) - The scale that this step used, float32 of shape :math:`()`; with a list of loss
          scales those of the networks, of shape :math:`(N,)`.
        - **losses** (Tensor) - The losses, float32 of shape :math:`(N,)`; a non-scalar loss enters as its sum.
        - **auxes** (tuple) - With `has_aux`, a tuple for each network of what it returned besides the loss; `()` if it
          has no aux.

    Raises:
        TypeError: As for :class:`ScaledTrainOneStepCell`, or if a network does not return its losses as described
            above.
        ValueError: As for :class:`ScaledTrainOneStepCell`, or if there are not as many networks as optimizers, two
            optimizers own the same parameter, or `network_inputs` or a list does not fit.
        RuntimeError: As for :class:`ScaledTrainOneStepCell`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn, ops
        >>> from ms_lossscale import DynamicLossScale, SimultaneousTrainOneStepCell
        >>> class GeneratorLoss(nn.Cell):
        ...     def __init__(self, generator, discriminator):
        ...         super().__init__(auto_prefix=False)
        ...         self.generator, self.discriminator = generator, discriminator
        ...
        ...     def construct(self, noise):
        ...         return ops.softplus(-self.discriminator(self.generator(noise))).mean()
        >>> class DiscriminatorLoss(nn.Cell):
        ...     def __init__(self, generator, discriminator):
        ...         super().__init__(auto_prefix=False)
        ...         self.generator, self.discriminator = generator, discriminator
        ...
        ...     def construct(self, real, noise):
        ...         fake = ops.stop_gradient(self.generator(noise))
        ...         return (ops.softplus(-self.discriminator(real)) + ops.softplus(self.discriminator(fake))).mean()
        >>> generator, discriminator = nn.Dense(2, 4), nn.Dense(4, 1)
        >>> generator.update_parameters_name("generator.")
        >>> discriminator.update_parameters_name("discriminator.")
        >>> cell = SimultaneousTrainOneStepCell(
        ...     [DiscriminatorLoss(generator, discriminator), GeneratorLoss(generator, discriminator)],
        ...     [nn.Adam(discriminator.trainable_params()), nn.Adam(generator.trainable_params())],
        ...     DynamicLossScale(),
        ...     network_inputs=[(0, 1), (1,)],
        ... )
        >>> real, noise = Tensor(np.ones((8, 4), np.float32)), Tensor(np.ones((8, 2), np.float32))
        >>> loss, overflow, loss_scale, losses = cell(real, noise)
        >>> print(overflow, loss_scale, losses.shape)
        False 65536.0 (2,)
    """

    @answers_keywords()
    def __init__(
        self,
        networks: Union[Sequence[Network], nn.CellList, nn.Cell],
        optimizers: Union[Sequence[nn.Cell], nn.CellList],
        loss_scale: OneOrEach[AcceptedLossScale] = None,
        *,
        network_inputs: Optional[Sequence[Sequence[int]]] = None,
        gradient_accumulation_steps: int = 1,
        clip_norm: OneOrEach[Optional[float]] = None,
        clip_value: OneOrEach[Optional[float]] = None,
        ema_decay: OneOrEach[Optional[float]] = None,
        has_aux: OneOrEach[bool] = False,
        forward_state: Sequence[Union[Parameter, nn.Cell]] = (),
        gradient_transforms: Sequence[Any] = (),
        after_update: Optional[AfterUpdate] = None,
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
        optimizers = check_cells(owner, "optimizers", optimizers)
        one_cell = not isinstance(networks, (list, tuple)) and type(networks) is not nn.CellList
        if one_cell:
            check_bool(owner, "has_aux", has_aux)
            networks = (as_network(owner, "networks", networks),)
        else:
            networks = as_networks(owner, "networks", networks)
            check_one_each(owner, networks, optimizers)
        settings = check_settings(owner, len(optimizers), **settings_among(locals()))
        loss_scales = own_loss_scales(owner, loss_scale, len(optimizers), prefix)
        of_cell = {"name_prefix": prefix, "may_return_tuple": one_cell}
        plan = StepPlan(owner, networks, optimizers, loss_scales, settings, **of_cell)
        super().__init__(networks, optimizers, [plan], network_inputs)
        self._each_has_scale = isinstance(loss_scale, (list, tuple))

    def construct(self, *inputs):
        # Indexed, since graph mode warns of a name that nothing uses.
        results = self._steps[0](*ops.depend(inputs, self._all_parameters))
        losses = prim.stack(gradients.sums(results[0]))
        scales = results[3]
        loss_scale = prim.stack(scales) if self._each_has_scale else scales[0]
        output = (prim.reduce_sum(losses), results[2], loss_scale, losses)
        if not self._has_aux:
            return output
        auxes = ()
        for aux in results[1]:
            auxes = (*auxes, or_none(aux))
        return (*output, auxes)
