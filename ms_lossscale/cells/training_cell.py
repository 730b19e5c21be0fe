"""The base class of the training cells: what their users can read and set."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, Optional, Union

from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

from ms_lossscale._arguments import OneOrEach, check_cell, one_each
from ms_lossscale._fixed_attributes import FixedAttributes
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._training_hooks import TrainingHooks
from ms_lossscale.cells.averages import Averages
from ms_lossscale.cells.call_types import Aux
from ms_lossscale.cells.earlier_versions import EarlierCycles
from ms_lossscale.cells.endless_skips import EndlessSkips
from ms_lossscale.cells.find_loss_scale import LossScaleSearch
from ms_lossscale.cells.first_call import CallCheck
from ms_lossscale.cells.fixed_arguments import fixed_arguments, instead_of_assigning
from ms_lossscale.cells.guard import Guard, explaining_errors
from ms_lossscale.cells.inner_gradients import InnerGradients
from ms_lossscale.cells.loading import load
from ms_lossscale.cells.rank_comparison import check_parallel, compare_ranks
from ms_lossscale.loss_scale import LossScale, as_loss_scale
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.build import build_step
from ms_lossscale.step.forward_backward import check_network_inputs, noticing_gradients
from ms_lossscale.step.gradient_transforms import prefix_own_states
from ms_lossscale.step.optimizers import Optimizers, check_optimizers, check_unique_names, prefix_states
from ms_lossscale.step.ranks import Alone, Ranks
from ms_lossscale.step.update import StepCounters


class TrainingCell(FixedAttributes, TrainingHooks, Generic[Aux]):
    """
    Base class of the training cells. It has one step, with one loss scale, for several networks. What is different in
    a cell, its class answers: the attributes and methods around the constructor, and `construct`. There is a `Settings`
    for each step.
    """

    # Whether measurements of the networks are lists, and whether each network has its own step, and its own loss scale.
    several_networks = True
    each_decides = False
    each_has_scale = False

    def __init__(self, networks, optimizers, loss_scales, settings, *, network_inputs=None, may_return_tuple=False):
        owner = type(self).__name__
        for network in networks:
            check_cell(owner, "network", network, "Pass a network that returns the loss, an nn.WithLossCell say.")
        check_optimizers(owner, optimizers, networks)
        network_inputs = check_network_inputs(owner, network_inputs, networks)
        loss_scales = [self._accepted(owner, loss_scale) for loss_scale in loss_scales]
        check_parallel(owner, settings)
        prefix_states(optimizers)
        prefix_own_states([its for each in settings for its in each.gradient_transforms], networks)
        super().__init__(
            networks[0] if len(networks) == 1 else nn.CellList(list(networks), auto_prefix=False),
            optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers),
        )
        self.network_inputs = network_inputs
        self._owner = owner
        self._settings = settings
        self._has_aux = any(any(its.has_aux) for its in settings)
        steps = self._build_steps(networks, optimizers, loss_scales, may_return_tuple)
        self.steps = nn.CellList(steps, auto_prefix=False)
        self._loss_scales = [loss_scale for step in steps for loss_scale in step.scaling.loss_scales]
        check_unique_names(owner, self.get_parameters())
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))
        self._are_compared = not self.reducer_flag
        self._check_call = CallCheck(self)
        self._guard = Guard(self, optimizers, settings[0].gradient_accumulation_steps)
        self._inner_gradients = InnerGradients(owner, self.several_networks)
        self._averages = Averages(owner, steps)
        # Those of `find_loss_scale`. What refers to this cell itself would keep it, and its memory, after its last use.
        self._trials = []
        self.endless_skips = EndlessSkips(owner, self.steps, self.each_decides)
        self.fix(*fixed_arguments(type(self), TrainingCell))

    @staticmethod
    def _accepted(owner, loss_scale):
        """Returns the loss scale of a step, a list of them if each of its networks has its own."""
        return as_loss_scale(owner, loss_scale)

    def _build_steps(self, networks, optimizers, loss_scales, may_return_tuple):
        step = build_step(
            self._owner,
            networks,
            optimizers,
            loss_scales[0],
            self._settings[0],
            self._ranks(self.grad_reducer),
            network_inputs=self.network_inputs,
            may_return_tuple=may_return_tuple,
        )
        return [step]

    def _ranks(self, grad_reducer):
        return Alone() if self.parallel_mode == "stand_alone" else Ranks(grad_reducer)

    def _inputs_of_step(self, i, inputs):
        """Returns the inputs of a call that step `i` takes."""
        return inputs

    def _returned(self, output):
        """Returns what a call returns: for a network without aux, graph mode can only return None."""
        if not self._has_aux:
            return output
        return (*output[:-1], tuple(() if aux is None else aux for aux in output[-1]))

    def _cycle_counts(self):
        """Returns what counts the calls of accumulation cycles."""
        return [step.cycle_state.count for step in self.steps if step.cycle_state is not None]

    def _earlier_cycles(self):
        return EarlierCycles(list(self.steps), self._cycle_counts())

    def _shared_state(self):
        """Returns the small Parameters, besides those of the steps, that must have the same values on all ranks."""
        return [parameter for count in self._cycle_counts() for parameter in count.get_parameters()]

    def _after_loading(self):
        """Is called when other values may have been loaded."""

    def _after_flush(self, overflows):
        """Is called with what `flush` of each step returned."""

    def set_inputs(self, *inputs: Any, **kwargs: Any) -> None:
        super().set_inputs(*inputs, **kwargs)
        for step in self.steps:
            step.forwards_and_backwards.set_inputs_of_compiled(inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._averages.are_in_place:
            self._averages.refuse("a step")
        self._before_step(args, kwargs)
        with explaining_errors(self), noticing_gradients(self._inner_gradients.notice):
            output = super().__call__(*args, **kwargs)
        if self._inner_gradients.taken_in is not None:
            self._inner_gradients.warn()
        self._guard.after(lambda i: output[1].asnumpy().reshape(-1)[i])
        self.endless_skips.after_call(output)
        return self._returned(output)

    def _before_step(self, inputs, keywords=()):
        if keywords or len(inputs) not in self._check_call.fitting_counts:
            self._check_call(inputs, keywords)
        if not self._are_compared:
            self.compare_ranks()
        self._guard.before(self.parameters_dict)

    def _instead_of_assigning(self, name):
        return instead_of_assigning(name)

    def _of_steps(self, values):
        """Returns what a method returns for each step: a list if each network decides alone."""
        return values if self.each_decides else values[0]

    def _of_loss_scales(self, values):
        """Returns what a method returns for each loss scale: a list if each network has its own."""
        return values if self.each_has_scale else values[0]

    @property
    def loss_scale(self) -> Union[LossScale, list[LossScale]]:
        """The loss scale; a list of them if each network has its own."""
        return self._of_loss_scales(list(self._loss_scales))

    @property
    def loss_scaling_manager(self) -> Union[LossScale, "TrainingCell"]:
        """
        For callbacks, an object with `get_loss_scale()`: the loss scale; or this cell, which returns a list, if each
        network has its own loss scale.
        """
        return self if self.each_has_scale else self._loss_scales[0]

    @property
    def overflow_detector(self) -> Union[OverflowDetector, list[OverflowDetector]]:
        """The overflow detector; a list of them if each network has its own overflow check."""
        return self._of_steps([step.forwards_and_backwards.overflow_detector for step in self.steps])

    @property
    def step_counters(self) -> Union[StepCounters, list[StepCounters]]:
        """The Cell that counts the steps; a list of them if each network has its own overflow check."""
        return self._of_steps([step.update.step_counters for step in self.steps])

    def get_loss_scale(self) -> Union[float, list[float]]:
        """Reads the scale that the next step will use; a list if each network has its own."""
        return self._of_loss_scales([loss_scale.get_loss_scale() for loss_scale in self._loss_scales])

    def set_loss_scale(self, value: OneOrEach[float]) -> None:
        """
        Sets the loss scale by hand, between two steps. Its update rule continues from there.

        Args:
            value (Union[float, list[float]]): The new scale, a finite number > 0. If each network has its own scale,
                one number for all of them or a list with one for each.

        Raises:
            TypeError: If a value is not a number.
            ValueError: If a value is not finite or not > 0, or if a list does not have one entry for each network.
        """
        owner = f"{type(self).__name__}.set_loss_scale"
        values = one_each(owner, "value", value, len(self._loss_scales)) if self.each_has_scale else [value]
        # All are checked before the first one is set.
        values = [its.check_scale(owner, "value", each) for its, each in zip(self._loss_scales, values)]
        for loss_scale, its_value in zip(self._loss_scales, values):
            loss_scale.set_loss_scale(its_value)

    @property
    def scale_sense(self) -> Tensor:
        """The present loss scale, for callbacks: float32 of shape (); of shape (N,) if each network has its own."""
        return Tensor(self.get_loss_scale(), mstype.float32)

    def forward_state_names(self) -> list[str]:
        """
        Names what a skipped step restores because the forward may write it. This is what was found in the networks,
        what was passed as `forward_state`, and the Parameters of `gradient_transforms`.

        Returns:
            list[str], the names of the Parameters. If MindSpore itself does not find a Parameter, ``"unregistered_0."``
            (or 1, 2, ...) comes before its name; before the name of a registered buffer, ``"buffer_0."`` and so on. The
            list is empty if no step is ever skipped.
        """
        return list(dict.fromkeys(name for step in self.steps for name in step.forward_state.names))

    def counters(self) -> Union[dict[str, int], list[dict[str, int]]]:
        """
        Reads how many steps were applied and skipped.

        Returns:
            dict, with the ints `applied_steps`, `skipped_steps` and `consecutive_skipped_steps`. With `max_retries` it
            also has `retries`, the number of all further attempts. A list of such dicts if each network has its own
            overflow check.
        """
        return self._of_steps([step.update.step_counters.as_dict() for step in self.steps])

    def steps_made(self) -> int:
        """Reads how many steps there were, skipped ones included."""
        return self.steps[0].update.step_counters.steps_made()

    def overflowed_parameters(self) -> list[str]:
        """
        Reads which gradients were not finite in the last step that was skipped. If each network has its own overflow
        check, it reads this for each network's last skipped step. Training itself never waits for this.

        Returns:
            list[str], the names of their parameters. It is empty if no step was skipped. It is also empty if all
            gradients were finite, and an NPU's status register, an overflow detector of your own, or what the forward
            wrote (see :meth:`forward_state_names`) showed the overflow.
        """
        return [name for step in self.steps for name in step.update.step_counters.overflowed_parameters()]

    def flush(self) -> None:
        """
        Ends a partial accumulation cycle: averages over the calls that it had, and updates or skips. Networks with
        their own overflow checks do so one after the other. Without accumulation, and between two cycles, this does
        nothing.

        Raises:
            RuntimeError: Within :meth:`ema_weights`.
        """
        if self._averages.are_in_place:
            self._averages.refuse("'flush()'")
        self._guard.before(self.parameters_dict)
        self._after_flush([step.flush() for step in self.steps])

    def grad_norm(self) -> Union[float, list[Optional[float]]]:
        """
        Reads the global norm of the gradients, before clipping, at the last overflow check.

        Returns:
            float, which is not finite if that step was skipped because of its gradients. For several networks a list,
            with None for a network without `clip_norm`.

        Raises:
            RuntimeError: If no `clip_norm` is set.
        """
        norms = [norm for step in self.steps for norm in step.update.clipping.norms()]
        if norms == [None] * len(norms):
            raise RuntimeError(
                f"For '{type(self).__name__}', 'grad_norm()' needs 'clip_norm': nothing measures the norm without it. "
                f'Construct the cell with clip_norm=float("inf") to measure and not clip.'
            )
        return norms if self.several_networks else norms[0]

    def ema_parameters(self) -> dict[str, Parameter]:
        """
        Returns the exponential moving averages of the weights. Before the first applied step, these are the present
        weights.

        Returns:
            dict from the weights' names to float32 Parameters.

        Raises:
            RuntimeError: If no `ema_decay` is set.
        """
        averages = {}
        for average in self._averages.of_each("ema_parameters"):
            averages.update(average.as_dict())
        return averages

    def ema_weights(self) -> AbstractContextManager[None]:
        """
        A context in which the weights hold their exponential moving averages, for evaluation. Afterwards it puts back
        exactly the trained weights, even if the evaluation raises. Inside the context you can't make a training step,
        nor call :meth:`flush` or :meth:`load_state_dict`.

        Returns:
            Context manager.

        Raises:
            RuntimeError: If no `ema_decay` is set.
        """
        return self._averages.in_place(self._averages.of_each("ema_weights"))

    def compare_ranks(self) -> None:
        """
        Compares the settings, weights, loss scale and counters of this cell with those of the other ranks. Ranks that
        differ would wait for each other forever, or silently train apart.

        The first call of the cell does this by itself, unless MindSpore compiles the cell into another one in
        GRAPH_MODE, because a cell of your own calls it or because of `dataset_sink_mode` on a device. In these cases,
        call this method on all ranks before.

        Raises:
            ValueError: On all ranks, if one of them differs from rank 0. The message names the differences.
        """
        compare_ranks(self)
        self._are_compared = True

    def find_loss_scale(self, *inputs: Any) -> Union[float, list[float]]:
        """
        Finds the loss scale to begin with. It runs a batch at powers of two between the `min_loss_scale` and the
        `max_loss_scale` of the :class:`DynamicLossScale`. Then it sets the scale to half of the largest one at which
        nothing overflows, which leaves headroom, but not below `min_loss_scale`.

        Nothing else changes: no weight moves, no step is counted, the update rule takes no step, and side effects of
        the forward are undone. Each scale that is tried costs a forward and a backward. With the default range five are
        tried; graph mode adds one compilation.

        Call `set_train()` first: the networks run in their present mode, and `Model.train` sets it only later. Within
        an accumulation cycle, the scale applies from the next cycle on, as with
        :meth:`ScaledTrainOneStepCell.set_loss_scale`. Several loss scales are searched one after the other; those that
        never move stay as they are. In a parallel job, all ranks must call this, each with its own batch, and find the
        same scale.

        Args:
            *inputs (Any): The inputs of a step.

        Returns:
            float, the loss scale that was set; a list if each network has its own.

        Raises:
            RuntimeError: If the batch overflows at every one of these scales (the message says at which smaller one it
                does not, if any), or if no loss scale is a
                :class:`DynamicLossScale`. The scale then stays as it was.

        Examples:
            >>> import numpy as np
            >>> from mindspore import Tensor, nn
            >>> from mindspore import dtype as mstype
            >>> from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
            >>> network = nn.Dense(4, 1, weight_init="zeros", bias_init="zeros").to_float(mstype.float16)
            >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
            >>> cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, DynamicLossScale())
            >>> x, y = Tensor(np.ones((8, 4), np.float32)), Tensor(np.full((8, 1), 10.0, np.float32))
            >>> cell.set_train().find_loss_scale(x, y)
            1024.0
            >>> cell.counters()
            {'applied_steps': 0, 'skipped_steps': 0, 'consecutive_skipped_steps': 0}
        """
        return LossScaleSearch(self, self._trials).find(inputs)

    def load_state_dict(self, parameters: Mapping[str, Tensor], strict: bool = True) -> tuple[list[str], list[str]]:
        """
        Loads a checkpoint of such a cell in place. You may call it at any time between two calls.

        Args:
            parameters (dict): From names to Parameters or Tensors, as :func:`mindspore.load_checkpoint` returns it. A
                cell with a :class:`ShardedOptimizer` takes the checkpoint of this rank, or one of the plain optimizer,
                as :func:`merge_shards` returns it. A plain optimizer ignores the master copies in it.
            strict (bool): Whether the names must be exactly those of this cell. Default: ``True`` .

        Returns:
            Tuple of two lists: the names of this cell that are missing in `parameters`, and the names in `parameters`
            that the cell does not have.

        Raises:
            TypeError: If `parameters` is not a dict from names to Parameters or Tensors, or `strict` is not a bool.
            ValueError: If a value does not have the shape of its Parameter, if a scale or a count is impossible, if
                `parameters` come from within an accumulation cycle with another `gradient_accumulation_steps`, or if
                they belong to another rank.
            RuntimeError: If `strict` is True and names are missing or unexpected, or within
                :meth:`ScaledTrainOneStepCell.ema_weights`. Nothing is written in these cases.
        """
        return load(self, parameters, strict)


def or_none(aux):
    """Returns aux, but None for an empty tuple, which graph mode can't return within another one."""
    return aux if len(aux) else None
