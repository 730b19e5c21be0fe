"""A training step around a forward and backward of the user's own."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Optional, Union

import mindspore
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._arguments import AfterUpdate, OneOrEach, check_bool, check_cells, describe
from ms_lossscale._base_cells import Float32Cell
from ms_lossscale._keywords import answers_keywords
from ms_lossscale._mindspore.graphs import MethodCell, in_compiled_code, is_compiling, refuse_compiled
from ms_lossscale._mindspore.parameters import take_held_gradients
from ms_lossscale._mindspore.pynative import forget_failed_calls, without_recording
from ms_lossscale.cells.call_checks import ANSWERS, CallChecks, check_no_compile_cache, held_gradients
from ms_lossscale.cells.guard import explaining_errors
from ms_lossscale.cells.inputs import warn_of_evaluation_mode
from ms_lossscale.cells.outputs import check_loss_and_overflow
from ms_lossscale.cells.rank_comparison import check_parallel
from ms_lossscale.cells.scaled_value_and_grad import ScaledValueAndGrad
from ms_lossscale.cells.training_state import TrainingState
from ms_lossscale.function_network import Network, as_networks, check_can_be_differentiated
from ms_lossscale.loss_scale import AcceptedLossScale
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.manual_calls import ManualCalls
from ms_lossscale.step.names import name_prefix, name_states, own_loss_scales
from ms_lossscale.step.optimizers import Optimizers, check_optimizers
from ms_lossscale.step.plan import StepPlan
from ms_lossscale.step.ranks import ranks_of
from ms_lossscale.step.returned import as_weight
from ms_lossscale.step.settings import check_settings, settings_among

_OUTSIDE_OF_JIT = "Call it once, before the compiled function, which then calls the function that it returns."


class ManualStep(TrainingState, Float32Cell):
    """
    The training step of this package for those who write the forward and backward themselves: with functions
    (:func:`mindspore.value_and_grad`), with as many backward passes as it takes, with anything between them.

    It is a transaction as in the training cells. If nothing overflowed, neither a gradient nor what the forward
    wrote, the whole update happens. Otherwise only the loss scale and the step counters change, and all else is as it
    was before `begin`: weights, optimizer state, moving averages, BatchNorm's moving statistics and what else
    :meth:`forward_state_names` lists. To try again, run the batch again.

    It works eagerly, and within a function that :func:`mindspore.jit` compiles, in GRAPH_MODE and in PYNATIVE_MODE.

    A step is what happens from :meth:`begin` to :meth:`end`; in between, :meth:`value_and_grad` differentiates.

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
        forward_state (Union[list, tuple]): What a skipped step restores besides, as for
            :class:`ScaledTrainOneStepCell`, such as weights that are moved between `begin` and `end`. Default: ``()`` .
        gradient_transforms (Union[list, tuple]): As for :class:`SimultaneousTrainOneStepCell`. Default: ``()`` .
        after_update (Union[Cell, Callable], optional): Likewise. Default: ``None`` .
        overflow_detector (OverflowDetector, optional): As for :class:`ScaledTrainOneStepCell`. Default: ``None`` .
        skip_conditions (Union[list[SkipCondition], tuple[SkipCondition]]): As for :class:`ScaledTrainOneStepCell`.
            Those that need a loss get what is passed to `end`. Default: ``()`` .
        gradients_reduced (Union[bool, str]): As for :class:`ScaledTrainOneStepCell`. Default: ``False`` .
        drop_overflowed_calls (bool): As for :class:`ScaledTrainOneStepCell`. Default: ``False`` .
        name (str, optional): Begins, with a dot, the names of what the step adds to a checkpoint, its counters and
            moving averages say, and those of the state of its optimizers, loss scales, gradient transforms and
            conditions. Two steps in one compiled function need different ones. A loss scale that two steps share gets
            that of the first. It stands in a monitor's lines. Default: ``None`` .

    Attributes:
        parameters (ParameterTuple): The weights of the optimizer, to differentiate by; for a list of optimizers a tuple
            with a ParameterTuple for each.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong value, an optimizer owns weights that `networks` do not reach, or
            `end` gets another number of gradients, gradients of other shapes, no `loss` where one is looked at, a
            `weight` unlike the calls before, or one if `parallel_mode` is ``"semi_auto_parallel"`` or
            ``"auto_parallel"`` .
        RuntimeError: If MindSpore's compile cache is on, or `end` is called without `begin`, see there. In compiled
            code, shapes that are not known are not checked.

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
        ...     return loss_fn(network(x), y)
        ...
        >>> value_and_grad = step.value_and_grad(forward)
        >>> def train_step(x, y):  # with @mindspore.jit, or without
        ...     x, y = step.begin(x, y)
        ...     loss, grads = value_and_grad(x, y)
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

    @answers_keywords(**ANSWERS)
    def __init__(
        self,
        networks: Union[Network, Sequence[Network]],
        optimizers: OneOrEach[nn.Cell],
        loss_scale: OneOrEach[AcceptedLossScale] = None,
        *,
        gradient_accumulation_steps: int = 1,
        clip_norm: OneOrEach[Optional[float]] = None,
        clip_value: OneOrEach[Optional[float]] = None,
        ema_decay: OneOrEach[Optional[float]] = None,
        forward_state: Sequence[Union[Parameter, nn.Cell]] = (),
        gradient_transforms: Sequence[Any] = (),
        after_update: Optional[AfterUpdate] = None,
        overflow_detector: Optional[OverflowDetector] = None,
        skip_conditions: Sequence[Any] = (),
        gradients_reduced: Union[bool, str] = False,
        drop_overflowed_calls: bool = False,
        name: Optional[str] = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        owner = type(self).__name__
        check_no_compile_cache(owner)
        prefix = name_prefix(owner, name)
        self._step_name = name
        self._several_networks = isinstance(optimizers, (list, tuple, nn.CellList))
        optimizers = check_cells(owner, "optimizers", optimizers if self._several_networks else [optimizers])
        networks = networks if isinstance(networks, (list, tuple)) or type(networks) is nn.CellList else [networks]
        check_can_be_differentiated(owner, "networks", networks)
        networks = as_networks(owner, "networks", networks)
        settings = check_settings(owner, len(optimizers), **settings_among(locals()))
        loss_scales = own_loss_scales(owner, loss_scale, len(optimizers), prefix)
        self._each_has_scale = isinstance(loss_scale, (list, tuple))
        check_optimizers(owner, optimizers, networks, are_pairs=False)
        check_parallel(owner, [settings])
        name_states(networks, optimizers, [settings], prefix)
        self._build(StepPlan(owner, networks, optimizers, loss_scales, settings, name_prefix=prefix, is_manual=True))
        self._fix("grad_reducer", "parameters", "optimizer", "begin", "end")
        self._fix_arguments(ManualStep)

    def _build(self, plan):
        self.networks = nn.CellList(list(plan.networks), auto_prefix=False)
        self.optimizer = plan.optimizers[0] if len(plan.optimizers) == 1 else Optimizers(plan.optimizers)
        self._weights_of_each = tuple(ParameterTuple(weights) for weights in plan.weights)
        self.parameters = self._weights_of_each if self._several_networks else self._weights_of_each[0]
        self._reduce_like_stock()
        ranks = ranks_of(self.parallel_mode, plan.settings.gradients_reduced, self.grad_reducer)
        plan = replace(plan, ranks=ranks)
        self._calls = ManualCalls(plan)
        self._modes_checked = False
        self._look_after([self._calls], plan.networks, plan.optimizers, [plan.settings])
        self._checks = CallChecks(plan, self.parallel_mode)
        # Graph mode runs these when it compiles.
        self._is_compiled_begin = in_compiled_code(self._checks.compiled_begin)
        self._is_compiled_scale = in_compiled_code(self._checks.compiled)
        self._check_end = ops.constexpr(self._checks.compiled_end)
        self._scaled = ops.constexpr(self._checks.scaled, reuse_result=False)
        # What Python calls, hidden from MindSpore: they have the same Parameters again.
        in_one_graph = self._calls.in_one_graph
        object.__setattr__(self, "_run_begin", in_one_graph(MethodCell(self._calls.begin).construct))
        object.__setattr__(self, "_run_end", in_one_graph(MethodCell(self._calls.end).construct))

    def _reduce_like_stock(self):
        """Takes what reduces gradients across ranks from a cell of MindSpore's, as the training cells have it."""
        self.parallel_mode = mindspore.get_auto_parallel_context("parallel_mode")
        self.reducer_flag = False
        self.mean = None
        self.grad_reducer = nn.Identity()
        if self.parallel_mode != "stand_alone":
            stock = nn.TrainOneStepCell(self.networks, self.optimizer)
            self.reducer_flag = stock.reducer_flag
            self.mean = getattr(stock, "mean", None)
            self.grad_reducer = stock.grad_reducer

    def begin(self, *inputs: Any) -> Any:
        """
        Begins a step: copies what the forward may write, and clears an NPU's status register. If the last step began
        but never ended, since an exception came between, it first restores what that forward wrote. It warns once if
        ten steps in a row, of which none was compiled, never ended.

        Args:
            *inputs (Any): The inputs of the forward.

        Returns:
            The inputs, which the forward then takes: a single one as it is, several as a tuple.
        """
        inputs = self._calls.begin_anew(*inputs) if self._is_compiled_begin() else self._begin_call(inputs)
        return inputs[0] if len(inputs) == 1 else inputs

    def end(
        self, *grads: Sequence[Tensor], loss: Optional[Tensor] = None, weight: Union[Tensor, float, None] = None
    ) -> Tensor:
        """
        Ends a step: unscales, accumulates, reduces across ranks, checks, and updates or undoes.

        In compiled code, an `end` without a `begin` of its own, forgotten, after another `end`, or with gradients that
        :meth:`value_and_grad` computed before it, updates nothing: it is counted as a skipped step, see
        :meth:`skip_reasons`, and the loss scale and an accumulation cycle stand still. Once, 50 skipped steps in a row
        are printed.

        Args:
            *grads (Union[tuple[Tensor], list[Tensor]]): The scaled gradients for each optimizer, in the order of its
                parameters. Without any, in PyNative mode, it takes those that a `.backward()` has left in the weights,
                and clears them.
            loss (Tensor, optional): Of any shape. What `skip_conditions` and `backoff_if_loss_not_finite` look at.
                Default: ``None`` .
            weight (Union[Tensor, float], optional): Of shape :math:`()`. The gradients, and the loss, are those of a
                sum over so many things, and those of the step are divided by the sum of the weights of all its calls,
                on all ranks. Either all calls give one, or none does. Default: ``None`` .

        Returns:
            Tensor, bool of shape :math:`()`: whether the step was skipped; within an accumulation cycle, whether it is
            known that it will be, with `drop_overflowed_calls` whether the call was dropped.

        Raises:
            ValueError: If there is another number of gradients, one of another shape, no `loss` where one is looked at,
                or a `weight` unlike the calls before.
            TypeError: If gradients are no tuples of real Tensors.
            RuntimeError: If no step has begun; in compiled code only, at compilation, if none ever did. There, a shape
                that is not known is not checked.
        """
        if not is_compiling():
            return self._end_call(grads, loss, weight)
        grads = gradients.as_tuples(grads)
        shapes = gradients.forms(grads)
        dtypes = gradients.dtypes(grads)
        losses = () if loss is None else (loss,)
        weights = () if weight is None else (as_weight("ManualStep.end", weight),)
        grads = grads if self._check_end(shapes, dtypes, loss is None, weight is not None) else ()
        return self._calls.end_if_begun(grads, losses, weights)

    def value_and_grad(
        self, function: Callable[..., Any], number: int = 0, has_aux: bool = False
    ) -> Callable[..., Any]:
        """
        Returns a function of the same inputs that computes the loss and its gradients by the weights of an optimizer,
        as :func:`mindspore.value_and_grad` does, but scaled by the loss scale of the step, ready for :meth:`end`. Call
        that function between :meth:`begin` and :meth:`end`, once or several times.

        Args:
            function (Callable): Returns the loss, a Tensor of any shape, whose sum is differentiated; with `has_aux`, a
                tuple `(loss, *aux)` of Tensors.
            number (int): The number of the optimizer. Default: ``0`` .
            has_aux (bool): Whether the function returns more than the loss. Default: ``False`` .

        Returns:
            Function, which returns `(loss, grads)`, with `has_aux` `((loss, *aux), grads)`. The loss is not scaled.

        Raises:
            RuntimeError: By that function, if it is called eagerly and no step has begun.
        """
        if is_compiling():
            return refuse_compiled("value_and_grad", _OUTSIDE_OF_JIT)
        owner = f"{type(self).__name__}.value_and_grad"
        if not callable(function):
            raise TypeError(f"For '{owner}', the argument 'function' must be a function, but got {describe(function)}.")
        check_bool(owner, "has_aux", has_aux)
        number = self._checks.optimizer_number(number)
        return ScaledValueAndGrad(self, function, self._weights_of_each[number], number, has_aux)

    def scale(self, loss: Tensor, number: int = 0) -> Tensor:
        """
        Multiplies a loss by the loss scale of this step; the product is what you differentiate, by
        :func:`mindspore.grad`, :func:`mindspore.ops.vmap` and the like. :meth:`value_and_grad` does it by itself.

        Args:
            loss (Tensor): The loss, of any shape.
            number (int): The number of the optimizer whose weights the loss trains, where each has a scale of its own.
                Default: ``0`` .

        Returns:
            Tensor, float32, of the loss's shape.

        Raises:
            RuntimeError: If it is called eagerly outside of :meth:`begin` ... :meth:`end`; by the function of a
                :meth:`value_and_grad` that calls it, since the loss would be scaled twice.
        """
        if not isinstance(loss, Tensor):
            raise TypeError("For 'ManualStep.scale', the argument 'loss' must be a Tensor, but got something else.")
        if not self._is_compiled_scale():
            self._check_begun("scale")
        return gradients.scaled(loss, self._scale_of_call(self._scaled(number)))

    def _scale_of_call(self, number):
        # For ScaledValueAndGrad, too: the scale of this number between `begin` and `end`.
        return prim.deepcopy(self._calls.held.scales[number])

    def _outputs_of_call(self, owner, outputs):
        check_loss_and_overflow(owner, outputs)
        loss, overflow = outputs[:2]
        # A copy, since the next call overwrites it.
        scales = gradients.copy(self._calls.held.scales)
        return loss, overflow, prim.stack(scales) if self._each_has_scale else scales[0]

    def _give_up_call(self):
        if self._checks.may_be_open:
            self._calls.give_up()
            self._close_call()

    def _close_call(self):
        self._calls.transaction.watch.end()
        self._checks.has_begun = False

    def _after_loading(self):
        self._checks.is_weighted = None
        # What the forward of a call that did not end wrote is overwritten.
        self._close_call()

    def construct(self, *inputs):
        raise RuntimeError(
            "A ManualStep is not called itself. Call its begin(*inputs) before your forward and backward, and its "
            "end(grads) after them."
        )

    def _check_begun(self, method):
        # In compiled code, `begin` leaves its mark only there.
        has_begun = self._checks.has_begun or bool(self._calls.is_open())
        self._checks.check_begun(f"{type(self).__name__}.{method}", has_begun)

    def _begin_call(self, inputs):
        checks = self._checks
        if checks.has_begun:
            # An exception may have come between, or after a backward().
            forget_failed_calls()
            take_held_gradients(itertools.chain(*self._weights_of_each))
            checks.give_up(self._calls.is_open)
        if not self._modes_checked:
            self._modes_checked = True
            warn_of_evaluation_mode(type(self).__name__, self.networks)
        self._guard.before(self)
        with explaining_errors(self), without_recording():
            self._give_up_call()
            self._run_begin(self._calls.held.token)
        checks.begin()
        return inputs

    def _end_call(self, grads, loss, weight):
        owner = f"{type(self).__name__}.end"
        checks = self._checks
        self._check_begun("end")
        grads = grads or held_gradients(type(self).__name__, self._weights_of_each)
        checks.gradients_and_loss(grads, loss, weight)
        losses = () if loss is None else (loss,)
        weights = () if weight is None else (as_weight(owner, weight),)
        self._refuse_on_averages("a step")
        if not checks.has_begun:
            # Compiled code has begun it, and nothing was looked at.
            self._guard.before(self)
        checks.weighted(weight is not None, self._calls.transaction.cycle)
        with explaining_errors(self), without_recording():
            self._calls.transaction.forward_state.memory.put_back_within_a_step()
            overflow = self._run_end(tuple(map(tuple, grads)), losses, weights)
        checks.end()
        self._guard.after(lambda _: overflow.asnumpy())
        return overflow
