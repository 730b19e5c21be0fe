"""What users read and set between the steps of a training cell, or of a ManualStep."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Optional, Union

from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

from ms_lossscale._arguments import OneOrEach, one_each
from ms_lossscale._fixed_attributes import FixedAttributes
from ms_lossscale.cells.guard import Guard
from ms_lossscale.cells.loading import load
from ms_lossscale.cells.rank_comparison import compare_ranks
from ms_lossscale.loss_scale import LossScale
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.averages import averages_in_place
from ms_lossscale.step.optimizers import check_unique_names
from ms_lossscale.step.state import StepCounters


class TrainingState(FixedAttributes):
    """
    Base class of what trains by steps: the training cells and ManualStep. There is a `Settings` for each step. What a
    class has of its own, it answers by the attributes and methods at the beginning.
    """

    # Whether measurements of the networks are lists, and whether each network has its own step, and its own loss scale.
    several_networks = True
    each_decides = False
    each_has_scale = False

    def _look_after(self, steps, optimizers, settings):
        """Takes the steps over, once all that holds Parameters has been made."""
        owner = type(self).__name__
        self._settings = settings
        self.steps = nn.CellList(steps, auto_prefix=False)
        self._loss_scales = [loss_scale for step in steps for loss_scale in step.transaction.loss_scales]
        check_unique_names(owner, self.get_parameters())
        self._are_compared = not self.reducer_flag
        self._guard = Guard(self, optimizers)
        self._holds_averages = False

    def _outputs_of_call(self, owner, outputs):
        """
        Returns what a call returned, in the form of a training cell's outputs, without aux. Raises unless `outputs` are
        all of them.
        """
        wanted = 4 if self.each_decides else 3
        if len(outputs) < wanted or not all(isinstance(each, Tensor) for each in outputs[:wanted]):
            raise ValueError(
                f"For '{owner}', there must be all {wanted} Tensors that the {type(self).__name__} returns, but got "
                f"{len(outputs)} values. Pass what the call returned: {owner.split('.')[-1]}(*cell(x, y))."
            )
        return outputs

    def _described_networks(self):
        """Returns, by name, what of the networks must be the same on all ranks, as JSON values."""
        raise NotImplementedError

    def _cycle_counts(self):
        """Returns what counts the calls of accumulation cycles."""
        return [step.transaction.cycle.count for step in self.steps if step.transaction.cycle is not None]

    def _shared_state(self):
        """Returns the small Parameters, besides those of the steps, that must have the same values on all ranks."""
        return [parameter for count in self._cycle_counts() for parameter in count.get_parameters()]

    def _after_loading(self):
        """Is called when other values may have been loaded."""

    def _after_flush(self, overflows):
        """Is called with what `flush` of each step returned."""

    def _refuse_on_averages(self, what):
        if self._holds_averages:
            raise RuntimeError(
                f"For '{type(self).__name__}', {what} within 'ema_weights()' would change the averages that the "
                f"weights hold there, and be lost when the trained weights come back. Leave the context first."
            )

    def _averages_of_each(self, method):
        """Returns a MovingAverage for each network that has one. Raises if none has: `method` needs one."""
        averages = []
        for transaction in (step.transaction for step in self.steps):
            if transaction.counters.none_applied():
                for average in transaction.averages:
                    average.begin()
            averages += transaction.averages
        if not averages:
            raise RuntimeError(
                f"For '{type(self).__name__}', '{method}()' needs 'ema_decay': no average is kept without it. "
                f"Construct the cell with ema_decay=0.999, say."
            )
        return averages

    @contextmanager
    def _with_averages(self, averages):
        outer, self._holds_averages = self._holds_averages, True
        try:
            with averages_in_place(averages):
                yield
        finally:
            self._holds_averages = outer

    def _instead_of_assigning(self, name):
        if name == "every":
            return "Call set_every(...), which applies from the next call on."
        return (
            "Set the scale itself with set_loss_scale(value). Construct a new cell with other arguments; "
            "new_cell.load_state_dict(cell.parameters_dict(), strict=False) continues from the state of this one."
        )

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
    def loss_scaling_manager(self) -> Union[LossScale, "TrainingState"]:
        """
        For callbacks, an object with `get_loss_scale()`: the loss scale; or this cell, which returns a list, if each
        network has its own loss scale.
        """
        return self if self.each_has_scale else self._loss_scales[0]

    @property
    def overflow_detector(self) -> Union[OverflowDetector, list[OverflowDetector]]:
        """The overflow detector; a list of them if each network has its own overflow check."""
        return self._of_steps([step.transaction.detector for step in self.steps])

    @property
    def step_counters(self) -> Union[StepCounters, list[StepCounters]]:
        """The Cell that counts the steps; a list of them if each network has its own overflow check."""
        return self._of_steps([step.transaction.counters for step in self.steps])

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
        Names what a skipped step restores: what MindSpore registers and nobody trains in the networks, gradient
        transforms, conditions and a detector of your own, and what was passed as `forward_state`.

        Returns:
            list[str], the names of the Parameters; before the name of a registered buffer, there is ``"buffer_0."`` and
            so on. The list is empty if no step is ever skipped.
        """
        return list(dict.fromkeys(name for step in self.steps for name in step.transaction.forward_state.names))

    def counters(self) -> Union[dict[str, int], list[dict[str, int]]]:
        """
        Reads how many steps were applied and skipped.

        Returns:
            dict, with the ints `applied_steps`, `skipped_steps` and `consecutive_skipped_steps`. With `max_retries` it
            also has `retries`, the number of all further attempts, and with `skip_conditions` `skipped_by_condition`. A
            list of such dicts if each network has its own overflow check.
        """
        return self._of_steps([step.transaction.counters.as_dict() for step in self.steps])

    def skip_reasons(self) -> Union[dict[str, Any], list[dict[str, Any]]]:
        """
        Reads for which reasons steps were skipped. Each skipped step counts for the first of these that holds:

        - `condition`, with `skip_conditions`: one of them asked for it, and nothing overflowed.
        - `loss`: a loss was not finite.
        - `forward_state`: what the forward wrote became not finite, see :meth:`forward_state_names`.
        - `gradients`: gradients were not finite, although the forward was.
        - `detector`: all of these were finite, but an NPU's status register, or an overflow detector of your own, told
          of an overflow.

        A ManualStep knows of its loss only what is passed to its `end`.

        Returns:
            dict from these names to ints, whose sum is the number of skipped steps. A list of such dicts if each
            network has its own overflow check. :meth:`overflowed_parameters` tells whose gradients it were last.
        """
        return self._of_steps([step.transaction.counters.reasons() for step in self.steps])

    def steps_made(self) -> int:
        """Reads how many steps there were, skipped ones included."""
        return self.steps[0].transaction.counters.steps_made()

    def overflowed_parameters(self) -> list[str]:
        """
        Reads which gradients were not finite in the last step that was skipped. If each network has its own overflow
        check, it reads this for each network's last skipped step. Training itself never waits for this.

        Returns:
            list[str], the names of their parameters. It is empty if no step was skipped. It is also empty if all
            gradients were finite, and an NPU's status register, an overflow detector of your own, or what the forward
            wrote (see :meth:`forward_state_names`) showed the overflow.
        """
        return [name for step in self.steps for name in step.transaction.counters.overflowed_parameters()]

    def flush(self) -> None:
        """
        Ends a partial accumulation cycle: averages over the calls that it had, and updates or skips. Networks with
        their own overflow checks do so one after the other. Without accumulation, and between two cycles, this does
        nothing.

        Raises:
            RuntimeError: Within :meth:`ema_weights`.
        """
        self._refuse_on_averages("'flush()'")
        self._guard.before(self)
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
        norms = [norm for step in self.steps for norm in step.transaction.norms()]
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
        of_each = self._averages_of_each("ema_parameters")
        return {weight.name: average for its in of_each for weight, average in its.pairs()}

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
        return self._with_averages(self._averages_of_each("ema_weights"))

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
