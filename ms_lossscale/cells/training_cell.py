"""The base class of the training cells: what their users can read and set."""

import contextlib
from typing import Any, Generic, Optional, Union

from mindspore import PYNATIVE_MODE, Parameter, Tensor, get_context, nn
from mindspore import dtype as mstype

from ms_lossscale._arguments import OneOrEach, check_cell, one_each
from ms_lossscale._memory_in_use import MemoryInUse, UseInOutermostGraph, known_memory
from ms_lossscale._mindspore import CompilePhase, Float32Cell, explanation, forget_failed_calls
from ms_lossscale.cells.call_types import Aux
from ms_lossscale.cells.earlier_versions import EarlierCycles, cycle_counts
from ms_lossscale.cells.endless_skips import EndlessSkips
from ms_lossscale.cells.find_loss_scale import FindsLossScale
from ms_lossscale.cells.fixed_arguments import FixedArguments
from ms_lossscale.cells.inner_gradients import NoticesInnerGradients
from ms_lossscale.cells.loading import BegunCycles, LoadsInPlace
from ms_lossscale.cells.possible_values import PossibleValues
from ms_lossscale.cells.rank_comparison import ComparesRanks, check_parallel
from ms_lossscale.cells.trains_only import TrainsOnly
from ms_lossscale.loss_scale import LossScale, as_loss_scale
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.sharding.load_parts import LoadedParts
from ms_lossscale.step.build import build_step
from ms_lossscale.step.forward_backward import check_network_inputs, noticing_gradients
from ms_lossscale.step.gradient_transforms import prefix_own_states
from ms_lossscale.step.optimizers import (
    Optimizers,
    add_prefix,
    check_optimizers,
    check_unique_names,
    network_prefix,
    prefix_states,
)
from ms_lossscale.step.own_loss_scales import own_loss_scales
from ms_lossscale.step.ranks import Alone, Ranks
from ms_lossscale.step.update import StepCounters, averages_in_place


class TrainingCell(
    FixedArguments,
    LoadsInPlace,
    FindsLossScale,
    NoticesInnerGradients,
    ComparesRanks,
    TrainsOnly,
    CompilePhase,
    Float32Cell,
    nn.TrainOneStepCell,
    Generic[Aux],
):
    """
    Base class of the training cells. A cell has one step for all its networks or, with `turns`, one for each. It has
    one loss scale or, with `has_own_scales`, a list of them, and a `Settings` for each step. With `several_networks`,
    measurements of the networks are returned as lists. A subclass defines `construct`.
    """

    def __init__(
        self,
        networks,
        optimizers,
        loss_scales,
        settings,
        *,
        network_inputs=None,
        may_return_tuple=False,
        several_networks=True,
        has_own_scales=False,
        turns=None,
    ):
        owner = type(self).__name__
        for network in networks:
            check_cell(owner, "network", network, "Pass a network that returns the loss, an nn.WithLossCell say.")
        check_optimizers(owner, optimizers, networks)
        network_inputs = check_network_inputs(owner, network_inputs, networks)
        accepted = own_loss_scales if has_own_scales else as_loss_scale
        loss_scales = [accepted(owner, loss_scale) for loss_scale in loss_scales]
        check_parallel(owner, settings)
        prefix_states(optimizers)
        prefix_own_states([its for each in settings for its in each.gradient_transforms], networks)
        super().__init__(
            networks[0] if len(networks) == 1 else nn.CellList(list(networks), auto_prefix=False),
            optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers),
        )
        self.network_inputs = network_inputs
        self.each_decides = turns is not None
        self.turns = turns
        self._owner = owner
        self._several_networks = several_networks
        self._settings = settings
        self._has_aux = any(any(its.has_aux) for its in settings)
        steps = self._build_steps(networks, optimizers, loss_scales, may_return_tuple)
        self.steps = nn.CellList(steps, auto_prefix=False)
        self._loss_scales = [loss_scale for step in steps for loss_scale in step.scaling.loss_scales]
        self._is_one_loss_scale = not self.each_decides and not has_own_scales
        if self.each_decides:
            # Each step reduces its own gradients.
            self.grad_reducer = nn.Identity()
        self._compared = not self.reducer_flag
        self._evaluates = False
        self.endless_skips = EndlessSkips(owner, self.steps, self.each_decides)
        check_unique_names(owner, self.get_parameters())
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))
        written = {id(parameter) for step in self.steps for parameter in step.forward_state.written}
        others = [parameter for parameter in self.get_parameters() if id(parameter) not in written]
        # Graph mode itself notices if Parameters get other memory between steps.
        self._others = MemoryInUse(others if get_context("mode") == PYNATIVE_MODE else ())
        self._loaded_parts = LoadedParts(owner, optimizers)
        self._earlier_cycles = EarlierCycles(list(self.steps), self.turns)
        counts = self._cycle_counts()
        self._begun_cycles = BegunCycles(owner, settings[0].gradient_accumulation_steps, counts)
        self._possible_values = PossibleValues(self)
        self._known_values = known_memory(self._possible_values.parameters())
        self._known_memory = known_memory(self._loaded_parts.layouts)
        self.fix_arguments(TrainingCell)

    def _build_steps(self, networks, optimizers, loss_scales, may_return_tuple):
        parts = [(slice(None), "")]
        if self.each_decides:
            parts = [(slice(i, i + 1), network_prefix(i)) for i in range(len(networks))]
            for (_, prefix), loss_scale in zip(parts, loss_scales):
                add_prefix(prefix, loss_scale.get_parameters())
        return [
            build_step(
                self._owner,
                networks[part],
                optimizers[part],
                loss_scale,
                its_settings,
                self._ranks_of(networks[part], optimizers[part]),
                # If each network has its own step, `construct` selects the inputs.
                network_inputs=None if self.each_decides else self.network_inputs,
                may_return_tuple=may_return_tuple,
                prefix=prefix,
                number=i,
            )
            for i, ((part, prefix), loss_scale, its_settings) in enumerate(zip(parts, loss_scales, self._settings))
        ]

    def _ranks_of(self, networks, optimizers):
        if self.parallel_mode == "stand_alone":
            return Alone()
        if not self.each_decides:
            return Ranks(self.grad_reducer)
        # MindSpore's reducer for the weights of one network.
        return Ranks(nn.TrainOneStepCell(networks[0], optimizers[0]).grad_reducer)

    def set_inputs(self, *inputs: Any, **kwargs: Any) -> None:
        super().set_inputs(*inputs, **kwargs)
        for step in self.steps:
            step.forwards_and_backwards.set_inputs_of_compiled(inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_trains("a step")
        if kwargs or len(args) not in self._fitting_counts:
            self._check_call(args, kwargs)
        if not self._compared:
            self.compare_ranks()
        self._check_loaded()
        with self._explaining_errors(), noticing_gradients(self._notice_gradient):
            output = super().__call__(*args, **kwargs)
        if self._takes_gradient is not None:
            self._warn_of_inner_gradient()
        self._others.has_run()
        for i, step in enumerate(self.steps):
            step.forward_state.memory.settle(lambda i=i: output[1].asnumpy().reshape(-1)[i])
            step.forward_state.memory.has_run()
        self.endless_skips.after_call(output)
        if self._several_networks and self._has_aux:
            auxes = tuple(() if aux is None else aux for aux in output[-1])
            output = (*output[:-1], auxes)
        return output

    @contextlib.contextmanager
    def _explaining_errors(self):
        try:
            yield
        except BaseException as error:
            forget_failed_calls()
            message = explanation(self, error) if isinstance(error, (RuntimeError, TypeError)) else None
            if message is None:
                raise
            raise RuntimeError(message) from error

    def _check_trains(self, what):
        if self._evaluates:
            raise RuntimeError(
                f"For '{self._owner}', {what} within 'ema_weights()' would change the averages that the weights hold "
                f"there, and be lost when the trained weights come back. Leave the context first."
            )

    def _put_memory_back(self):
        for memory in (self._others, *(step.forward_state.memory for step in self.steps)):
            memory.put_back()

    def _of_steps(self, values):
        """Returns what a method returns for each step: a list if each network decides alone."""
        return values if self.each_decides else values[0]

    def _of_loss_scales(self, values):
        """Returns what a method returns for each loss scale: a list if each network has its own."""
        return values[0] if self._is_one_loss_scale else values

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
        return self._loss_scales[0] if self._is_one_loss_scale else self

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
        values = [value] if self._is_one_loss_scale else one_each(owner, "value", value, len(self._loss_scales))
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
        counts_steps = self.turns if self.each_decides else self.steps[0].update.step_counters
        return counts_steps.steps_made()

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
        self._check_trains("'flush()'")
        self._check_loaded()
        overflows = [step.flush() for step in self.steps]
        if self.each_decides:
            self.turns.flush(overflows)
            self.shared_state.flush(overflows)

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
        return norms if self._several_networks else norms[0]

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
        for moving_average in self._moving_averages("ema_parameters"):
            averages.update(moving_average.as_dict())
        return averages

    def ema_weights(self) -> contextlib.AbstractContextManager[None]:
        """
        A context in which the weights hold their exponential moving averages, for evaluation. Afterwards it puts back
        exactly the trained weights, even if the evaluation raises. Inside the context you can't make a training step,
        nor call :meth:`flush` or :meth:`load_state_dict`.

        Returns:
            Context manager.

        Raises:
            RuntimeError: If no `ema_decay` is set.
        """
        return self._evaluating(self._moving_averages("ema_weights"))

    @contextlib.contextmanager
    def _evaluating(self, moving_averages):
        outer, self._evaluates = self._evaluates, True
        try:
            with averages_in_place(moving_averages):
                yield
        finally:
            self._evaluates = outer

    def _moving_averages(self, method):
        moving_averages = []
        for step in self.steps:
            if step.update.step_counters.none_applied():
                for moving_average in step.update.moving_averages:
                    moving_average.begin()
            moving_averages += step.update.moving_averages
        if not moving_averages:
            raise RuntimeError(
                f"For '{type(self).__name__}', '{method}()' needs 'ema_decay': no average is kept without it. "
                f"Construct the cell with ema_decay=0.999, say."
            )
        return moving_averages

    def _cycle_counts(self):
        return cycle_counts(self.steps, self.turns)


def or_none(aux):
    """Returns aux, but None for an empty tuple, which graph mode can't return within another one."""
    return aux if len(aux) else None
