"""A training step around a forward and backward of the user's own."""

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Optional, Union

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale._arguments import AfterUpdate, OneOrEach, check_cells
from ms_lossscale._gradients import of_network
from ms_lossscale._mindspore import (
    Float32Cell,
    forget_failed_calls,
    loads_what_was_compiled,
    take_held_gradients,
    without_recording,
)
from ms_lossscale.cells.argument_order import check_order
from ms_lossscale.cells.evaluation_mode import warn_of_evaluation_mode
from ms_lossscale.cells.fixed_arguments import fixed_arguments
from ms_lossscale.cells.given_gradients import (
    check_is_weighted,
    check_loss,
    check_number,
    check_shapes,
    expected_gradients,
    fit_compiled,
    shapes_of,
    what_needs_loss,
)
from ms_lossscale.cells.guard import explaining_errors
from ms_lossscale.cells.rank_comparison import check_parallel, check_weight
from ms_lossscale.cells.training_state import TrainingState
from ms_lossscale.cells.unscaled_losses import UnscaledLosses
from ms_lossscale.function_network import Network, as_networks, check_can_be_differentiated
from ms_lossscale.loss_scale import AcceptedLossScale
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.skip_condition import SkipCondition
from ms_lossscale.step.build import build_manual_step
from ms_lossscale.step.gradient_transforms import prefix_own_states
from ms_lossscale.step.held_call import HeldCall
from ms_lossscale.step.optimizers import Optimizers, check_optimizers, prefix_states
from ms_lossscale.step.own_loss_scales import loss_scale_of_each
from ms_lossscale.step.returned import as_weight, described
from ms_lossscale.step.scaling import scaled
from ms_lossscale.step.settings import check_settings, transforms_of_each


class ManualStep(TrainingState, Float32Cell):
    """
    The training step of this package for those who write the forward and backward themselves: with functions
    (:func:`mindspore.value_and_grad`), with as many backward passes as it takes, with anything between them.

    A step is what happens between `begin` and `end`, and a transaction as in the training cells. If nothing overflowed,
    neither a gradient nor anything that the forward wrote, the whole update happens. Otherwise only the loss scale and
    the step counters change, and all else is as it was before `begin`: weights, optimizer state, BatchNorm's moving
    statistics, what your own cells write in their forward, and moving averages.

    It works eagerly, and within a function that :func:`mindspore.jit` compiles, in GRAPH_MODE and in PYNATIVE_MODE.

    - **begin(\\*inputs)** - Begins a step, and returns the inputs for the forward: a single one as it is, several as a
      tuple. It copies what the forward may write, and clears an NPU's status register. If the last step began but never
      ended, since an exception came between, it first restores what that forward wrote.
    - **end(\\*grads, loss=None, weight=None)** - Ends the step: unscales, accumulates, reduces across ranks, checks,
      and updates or undoes. It takes a tuple of scaled gradients for each optimizer, in the order of its parameters,
      and returns whether the step was skipped (or, within an accumulation cycle, what is known so far), a bool Tensor
      of shape :math:`()`. Without gradients, in PyNative mode, it takes those that a `.backward()` has left in the
      weights, and clears them there. The `loss`, a Tensor of any shape, is what `skip_conditions` and
      `backoff_if_loss_not_finite` look at, and warnings. With a `weight`, a number or a Tensor of shape :math:`()`, the
      gradients are those of a sum over so many things, and those of the step are divided by the sum of the weights of
      all its calls, on all ranks. Either all calls give one, or none does.

    Args:
        networks (Union[Cell, Callable, list]): What the forward runs, Cells or functions, however many they are: what a
            skipped step restores is found in them, and modes and checkpoints reach them.
        optimizers (Union[Cell, list[Cell]]): One optimizer, or several that share one overflow check and one update.
            They must not divide by a loss scale of their own.
        loss_scale (Union[None, float, LossScale, list, ...]): As for :class:`SimultaneousTrainOneStepCell`: one, or a
            list with one for each optimizer. Default: ``None`` .
        gradient_accumulation_steps (int): The number of calls, each from `begin` to `end`, whose gradients are averaged
            for one update; :meth:`flush` ends a cycle earlier. Default: ``1`` .
        clip_norm (Union[float, list], optional): As for :class:`SimultaneousTrainOneStepCell`, over the gradients of
            one optimizer. Default: ``None`` .
        clip_value (Union[float, list], optional): Likewise. Default: ``None`` .
        ema_decay (Union[float, list], optional): Likewise. Default: ``None`` .
        forward_state (Union[list[Parameter], tuple[Parameter]]): Further Parameters that your code writes between
            `begin` and `end`, and that a skipped step restores, such as weights that are moved for a while.
            Default: ``()`` .
        gradient_transforms (Union[list, tuple]): As for :class:`SimultaneousTrainOneStepCell`. Default: ``()`` .
        after_update (Union[Cell, Callable], optional): Likewise. Default: ``None`` .
        overflow_detector (OverflowDetector, optional): As for :class:`ScaledTrainOneStepCell`. Default: ``None`` .
        skip_conditions (Union[list[SkipCondition], tuple[SkipCondition]]): As for :class:`ScaledTrainOneStepCell`.
            Those that need a loss get what is passed to `end`. Default: ``()`` .
        gradients_reduced (Union[bool, str]): As for :class:`ScaledTrainOneStepCell`. Default: ``False`` .

    Attributes:
        parameters (ParameterTuple): The weights of the optimizer, to differentiate by; for a list of optimizers a tuple
            with a ParameterTuple for each.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong value, an optimizer owns weights that `networks` do not reach, or
            `end` gets another number of gradients, gradients of other shapes, no `loss` where one is looked at, a
            `weight` unlike the calls before, or one if `parallel_mode` is ``"semi_auto_parallel"`` or
            ``"auto_parallel"`` .
        RuntimeError: If MindSpore's compile cache is on, or `end` is called without `begin`. In compiled code, the
            latter and the shapes are not checked.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_lossscale import DynamicLossScale, ManualStep
        >>> mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        >>> network, loss_fn = nn.Dense(4, 1, weight_init="zeros", bias_init="zeros"), nn.MSELoss()
        >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> step = ManualStep(network, optimizer, DynamicLossScale(2.0**10), clip_norm=1.0)
        >>> def forward(x, y):
        ...     loss = loss_fn(network(x), y)
        ...     return step.scale(loss), loss
        ...
        >>> value_and_grad = mindspore.value_and_grad(forward, None, step.parameters, has_aux=True)
        >>> def train_step(x, y):  # with @mindspore.jit, or without
        ...     x, y = step.begin(x, y)
        ...     (_, loss), grads = value_and_grad(x, y)
        ...     return loss, step.end(grads)
        ...
        >>> x, y = Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones((2, 1), np.float32))
        >>> loss, overflow = train_step(x, y)
        >>> print(loss, overflow)
        1.0 False
        >>> loss, overflow = train_step(x * float("inf"), y)
        >>> print(overflow, step.get_loss_scale())
        True 512.0
        >>> step.counters()
        {'applied_steps': 1, 'skipped_steps': 1, 'consecutive_skipped_steps': 1}
    """

    _instead_of: ClassVar = {
        "max_retries": "After an overflow, call begin, your forward and backward, and end again with the same batch: "
        "all but the loss scale and the counters is as before. Not within an accumulation cycle, which is lost.",
        "has_aux": "What your own forward returns besides the loss is yours.",
        "weighted": "Pass the weight of each call to its end: end(grads, weight=n).",
    }

    def __init__(
        self,
        networks: Union[Network, Sequence[Network]],
        optimizers: Union[nn.Cell, Sequence[nn.Cell]],
        loss_scale: OneOrEach[AcceptedLossScale] = None,
        *,
        gradient_accumulation_steps: int = 1,
        clip_norm: OneOrEach[Optional[float]] = None,
        clip_value: OneOrEach[Optional[float]] = None,
        ema_decay: OneOrEach[Optional[float]] = None,
        forward_state: Sequence[Parameter] = (),
        gradient_transforms: Union[Sequence[nn.Cell], Sequence[Sequence[nn.Cell]]] = (),
        after_update: Optional[AfterUpdate] = None,
        overflow_detector: Optional[OverflowDetector] = None,
        skip_conditions: Sequence[SkipCondition] = (),
        gradients_reduced: Union[bool, str] = False,
    ) -> None:
        super().__init__(auto_prefix=False)
        owner = type(self).__name__
        check_order(owner, networks=networks, optimizers=optimizers, loss_scale=loss_scale)
        if loads_what_was_compiled():
            raise RuntimeError(
                f"For '{owner}', MindSpore's compile cache must be off: a function that is loaded from it has not the "
                f"weights and the loss scale of the present process, and trains wrongly or crashes, with and without "
                f"this package. Unset MS_COMPILER_CACHE_ENABLE, or call "
                f"mindspore.set_context(enable_compile_cache=False). The training cells work with it."
            )
        self.several_networks = isinstance(optimizers, (list, tuple, nn.CellList))
        optimizers = check_cells(owner, "optimizers", optimizers if self.several_networks else [optimizers])
        are_several = isinstance(networks, (list, tuple)) or type(networks) is nn.CellList
        networks = networks if are_several else [networks]
        check_can_be_differentiated(owner, "networks", networks)
        networks = as_networks(owner, "networks", networks)
        check_optimizers(owner, optimizers, networks, are_pairs=False)
        count = len(optimizers)
        settings = check_settings(
            owner,
            count,
            gradient_accumulation_steps=gradient_accumulation_steps,
            clip_norm=clip_norm,
            clip_value=clip_value,
            ema_decay=ema_decay,
            has_aux=False,
            forward_state=forward_state,
            gradient_transforms=transforms_of_each(owner, gradient_transforms, count),
            after_update=after_update,
            overflow_detector=overflow_detector,
            max_retries=0,
            weighted=False,
            skip_conditions=skip_conditions,
            gradients_reduced=gradients_reduced,
        )
        loss_scales = loss_scale_of_each(owner, loss_scale, count)
        self.each_has_scale = isinstance(loss_scales, list)
        check_parallel(owner, [settings])
        prefix_states(optimizers)
        prefix_own_states(settings.gradient_transforms, networks)
        prefix_own_states([settings.skip_conditions], networks, "condition")
        self.networks = nn.CellList(list(networks), auto_prefix=False)
        self.optimizer = optimizers[0] if count == 1 else Optimizers(optimizers)
        weights = tuple(ParameterTuple(its.parameters) for its in optimizers)
        self.parameters = weights if self.several_networks else weights[0]
        self._join_ranks()
        ranks = self._ranks(self.grad_reducer, settings)
        step, parts = build_manual_step(owner, networks, optimizers, loss_scales, settings, ranks)
        self._parts, self._held, self._has_begun = parts, parts.held, False
        self._modes_checked = False
        # Whether calls have a weight, None before the first.
        self._is_weighted = None
        self._look_after([step], optimizers, [settings])
        unscaled = UnscaledLosses(owner, self._loss_scales)
        self._scale_of_call = ScaleOfCall(self, step.scaling, parts.held, unscaled)
        self.begin = Begin(self, parts.begin)
        self.end = End(self, parts.end, what_needs_loss(settings.skip_conditions, self._loss_scales), unscaled)
        self.fix("networks", "optimizer", "parameters", "begin", "end", *fixed_arguments(type(self), TrainingState))

    def _join_ranks(self):
        """Takes MindSpore's reducer of the gradients."""
        self.parallel_mode = mindspore.get_auto_parallel_context("parallel_mode")
        self.reducer_flag, self.mean, self.grad_reducer = False, None, nn.Identity()
        if self.parallel_mode != "stand_alone":
            stock = nn.TrainOneStepCell(self.networks, self.optimizer)
            self.reducer_flag, self.grad_reducer = stock.reducer_flag, stock.grad_reducer
            if self.reducer_flag:
                # Where it reduces nothing it has none.
                self.mean = stock.mean

    def scale(self, loss: Tensor, number: int = 0) -> Tensor:
        """
        Multiplies a loss by the loss scale of this step; the product is what you differentiate. Call it between
        :attr:`begin` and :attr:`end`, in as many forwards as there are.

        Args:
            loss (Tensor): The loss, of any shape.
            number (int): The number of the optimizer whose weights the loss trains, where each has a scale of its own.
                Default: ``0`` .

        Returns:
            Tensor, float32, of the loss's shape.
        """
        return scaled(loss, self._scale_of_call(number))

    def _outputs_of_call(self, owner, outputs):
        loss, overflow, *others = outputs
        if any(each is not None for each in others):
            raise ValueError(
                f"For '{owner}', with a ManualStep there must be two values, the loss and what 'end' returned, but got "
                f"{described(outputs)}. Pass {owner.split('.')[-1]}(loss, overflow)."
            )
        # A copy, since the next call overwrites it.
        return loss, overflow, gradients.copy(self._held.scale)

    def _after_loading(self):
        self._is_weighted = None

    def construct(self, *inputs):
        raise RuntimeError(
            "A ManualStep is not called itself. Call its begin(*inputs) before your forward and backward, and its "
            "end(grads) after them."
        )

    def _described_networks(self):
        return {"networks": len(self.networks)}

    def _begin_call(self):
        self._held.refuse_if_looked_into()
        self._refuse_on_averages("a step")
        if self._has_begun:
            # An exception may have come between, or after a backward().
            forget_failed_calls()
            take_held_gradients(self._weights())
        if not self._are_compared:
            self.compare_ranks()
        if not self._modes_checked:
            self._modes_checked = True
            warn_of_evaluation_mode(type(self).__name__, self.networks)
        self._guard.before(self.parameters_dict)
        self._parts.fit()
        with explaining_errors(self), without_recording():
            self._parts.run_begin(self._held.token)
        self._has_begun = True

    def _end_call(self, grads, loss, weight):
        self._refuse_on_averages("a step")
        # In compiled code, `begin` leaves its mark only there.
        if not self._has_begun and not self._held.is_open.asnumpy():
            raise RuntimeError(
                f"For '{type(self).__name__}', 'end()' ends the step that 'begin()' began, but none has begun. Call "
                f"begin(*inputs) in each step, and run the forward on what it returns."
            )
        check_loss(self.end.owner, self.end.what_needs_loss, loss is None)
        flat = self._checked(grads) if grads else self._held_by_weights()
        weights = self._checked_weight(weight)
        losses = () if loss is None else (loss,)
        self.end.unscaled.notice()
        with explaining_errors(self), without_recording():
            overflow = self._parts.run_end(gradients.copy(self._held.scale), tuple(flat), losses, weights)
        self._has_begun = False
        self._guard.after(lambda _: overflow.asnumpy())
        self.warnings.after_call()
        return overflow

    def _weights_of_each(self):
        return self.parameters if self.several_networks else (self.parameters,)

    def _weights(self):
        return [weight for its in self._weights_of_each() for weight in its]

    def _checked(self, grads):
        """Returns the gradients in one flat list. Raises unless there is one of its shape for each weight."""
        owner, expected, several = self.end.expected
        check_number(owner, expected, len(grads))
        check_shapes(owner, expected, several, shapes_of(owner, several, grads))
        return [grad for its_grads in grads for grad in its_grads]

    def _checked_weight(self, weight):
        """Returns a tuple of the weight, or of none. Raises if it is not possible, or other calls had none, or one."""
        if weight is not None:
            check_weight(self.end.owner, "weight", self.parallel_mode)
        if self._is_weighted is None:
            cycle = self.steps[0].cycle_state
            has_begun = cycle is not None and cycle.count.has_begun()
            self._is_weighted = bool(cycle.is_weighted.asnumpy()) if has_begun else weight is not None
        check_is_weighted(self.end.owner, self._is_weighted, weight is not None)
        return () if weight is None else (as_weight(self.end.owner, weight),)

    def _held_by_weights(self):
        weights = self._weights()
        grads = take_held_gradients(weights)
        if all(grad is None for grad in grads):
            raise RuntimeError(
                f"For '{type(self).__name__}', 'end()' without gradients takes those that a backward() has left in the "
                f"weights, but there are none. Pass the gradients: end(grads)."
            )
        return [ops.zeros_like(weight) if grad is None else grad for weight, grad in zip(weights, grads)]


class _Part(nn.Cell):
    """A part of a call: its beginning, scale or end. Compiled code knows only `construct`; `__call__` does more."""

    def __init__(self, manual_step, part):
        super().__init__(auto_prefix=False)
        self.part = part
        # Hidden from MindSpore, and no reference that would keep the step itself alive.
        object.__setattr__(self, "_manual_step", weakref.ref(manual_step))


class Begin(_Part):
    """Begins a call of a :class:`ManualStep`, see there."""

    def __call__(self, *inputs: Any) -> Any:
        self._manual_step()._begin_call()
        return inputs[0] if len(inputs) == 1 else inputs

    def construct(self, *inputs):
        inputs = self.part(*inputs)
        return inputs[0] if len(inputs) == 1 else inputs


class ScaleOfCall(_Part):
    """
    Returns the loss scale of an optimizer between `begin` and `end`. Compiled code reads that of the LossScale, which
    nothing writes before `end`: it could read what `begin` writes too early, where nothing that comes from its inputs
    is waited for.
    """

    def __init__(self, manual_step: ManualStep, scaling: nn.Cell, held: HeldCall, unscaled: UnscaledLosses) -> None:
        super().__init__(manual_step, scaling)
        self.held = held
        self.ones = Tensor(np.ones(held.scale.shape, np.float32))
        self.unscaled, self.note_scaled = unscaled, ops.constexpr(unscaled.note_scaled)

    def __call__(self, number: int) -> Tensor:
        return of_network(self.unscaled.note_scaled(number), self._manual_step()._held.scale)

    def construct(self, number):
        # Known when it is compiled.
        scale = self.ones if self.held.is_looked_into else self.part.peek()
        return of_network(self.note_scaled(number), scale)


class End(_Part):
    """Ends a call of a :class:`ManualStep`, see there."""

    def __init__(
        self,
        manual_step: ManualStep,
        part: nn.Cell,
        what_needs_loss: tuple[str, ...],
        unscaled: UnscaledLosses,
    ) -> None:
        super().__init__(manual_step, part)
        # What the gradients must be: its name for messages, the weights of each optimizer, and whether they are a list.
        self.owner, several = f"{type(manual_step).__name__}.end", manual_step.several_networks
        self.expected = self.owner, expected_gradients(manual_step._weights_of_each()), several
        self.what_needs_loss, self.parallel_mode = what_needs_loss, manual_step.parallel_mode
        self.unscaled, self.notice_unscaled = unscaled, ops.constexpr(unscaled.notice)

    def __call__(
        self, *grads: Sequence[Tensor], loss: Optional[Tensor] = None, weight: Union[Tensor, float, None] = None
    ) -> Tensor:
        return self._manual_step()._end_call(grads, loss, weight)

    def construct(self, *grads, loss=None, weight=None):
        given = gradients.forms(grads), self.what_needs_loss, loss is not None, weight is not None
        grads = grads if fit_compiled(self.expected, *given, self.parallel_mode) and self.notice_unscaled() else ()
        flat = ()
        for its in grads:
            flat += its
        losses = () if loss is None else (loss,)
        weights = () if weight is None else (as_weight(self.owner, weight),)
        # Not the one that `begin` wrote, see ScaleOfCall.
        return self.part(self.part.step.scaling.peek(), flat, losses, weights)
