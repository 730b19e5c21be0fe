"""What a step is built of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from mindspore import ParameterTuple, nn
from mindspore import dtype as mstype

from ms_lossscale.loss_scale import LossScale
from ms_lossscale.overflow_detector import FiniteGradients, FloatStatusRegister
from ms_lossscale.step.names import network_prefix
from ms_lossscale.step.ranks import Ranks, are_split
from ms_lossscale.step.settings import Settings


@dataclass(frozen=True)
class StepPlan:
    """What a step is built of. Its parts take what they need from it."""

    # The training cell's name, for error messages.
    owner: str
    # One for each optimizer, or one that returns all losses; of a ManualStep as many as the user's forward takes.
    networks: Sequence[nn.Cell]
    optimizers: Sequence[nn.Cell]
    # One that the networks share, or one for each.
    loss_scales: Sequence[LossScale]
    settings: Settings
    # What connects the ranks, None if the process trains alone.
    ranks: Optional[Ranks] = None
    # What the names of all state of the cell begin with; what those of this step go on with, but for averages; and
    # the number of its first network in the cell.
    name_prefix: str = ""
    step_prefix: str = ""
    number: int = 0
    # The positions of the inputs that each network takes, None if each takes all.
    network_inputs: Optional[Sequence[Sequence[int]]] = None
    # Whether a network may return its only loss in a tuple.
    may_return_tuple: bool = False
    is_manual: bool = False
    # Whether its networks take part in some calls of the cell only.
    takes_turns: bool = False

    @property
    def prefix(self) -> str:
        """What the names of its state begin with, but for averages."""
        return f"{self.name_prefix}{self.step_prefix}"

    @property
    def weights(self) -> list[ParameterTuple]:
        """The weights that each optimizer trains."""
        return [optimizer.parameters for optimizer in self.optimizers]

    @property
    def prefixes(self) -> list[str]:
        """What the names of each network's state begin with."""
        count = len(self.optimizers)
        return [f"{self.prefix}{network_prefix(i)}" for i in range(count)] if count > 1 else [self.prefix]

    @property
    def split(self) -> list[tuple[bool, ...]]:
        """Of each network's weights, whether each rank has its own part."""
        return [are_split(self.ranks, weights) for weights in self.weights]

    @property
    def grad_reducer(self) -> Optional[nn.Cell]:
        """What reduces gradients across the ranks, None if nothing does, or something else."""
        return None if self.ranks is None else self.ranks.grad_reducer

    @property
    def checks(self) -> bool:
        """Whether the step is checked for overflow."""
        return self.loss_scales[0].drop_overflow_update

    @property
    def may_unscale_in_update(self) -> bool:
        """
        Whether gradients may be checked scaled, and unscaled where they are applied: there it is one multiplication
        with the clipping's, or a device makes it one kernel with the optimizer. Not where something else looks at them
        before, adds them up or exchanges them, nor where scales may be below 1: these could make finite gradients
        infinite after the check.
        """
        settings = self.settings
        added_up = settings.gradient_accumulation_steps > 1 or any(settings.weighted)
        norm_of_several_scales = self.has_own_scales and len(settings.skip_conditions) > 0
        if self.users_look_at_gradients or added_up or norm_of_several_scales or self.ranks is not None:
            return False
        if self.is_manual:
            return False
        are_float32 = all(weight.dtype == mstype.float32 for weights in self.weights for weight in weights)
        return are_float32 and all(loss_scale._stays_at_least_one() for loss_scale in self.loss_scales)

    @property
    def users_look_at_gradients(self) -> bool:
        """Whether cells of the user's, which may write what is their own, look at gradients before the verdict."""
        if any(self.settings.gradient_transforms):
            return True
        return self.checks and type(self.settings.overflow_detector) not in (FiniteGradients, FloatStatusRegister)

    @property
    def is_unscaled(self) -> bool:
        """Whether no loss is scaled, as long as nobody sets another loss scale than 1."""
        return all(loss_scale._is_none for loss_scale in self.loss_scales)

    @property
    def may_skip(self) -> bool:
        """Whether the step may be skipped."""
        return self.checks or len(self.settings.skip_conditions) > 0

    @property
    def may_end_no_step(self) -> bool:
        """Whether a call may end without that a step does."""
        return self.settings.gradient_accumulation_steps > 1 or self.takes_turns

    @property
    def drops_calls(self) -> bool:
        """Whether calls of an accumulation cycle may be dropped."""
        return self.checks and self.settings.drop_overflowed_calls

    @property
    def is_patient(self) -> bool:
        """Whether a loss scale stands still where a forward was not finite."""
        return self.checks and not all(loss_scale.backoff_if_loss_not_finite for loss_scale in self.loss_scales)

    @property
    def has_own_scales(self) -> bool:
        """Whether each of several networks has a loss scale of its own."""
        return len(self.loss_scales) > 1

    @property
    def losses(self) -> int:
        """How many losses the step is given: a ManualStep gets one for all its networks."""
        return 1 if self.is_manual else len(self.optimizers)

    @property
    def scale_of_network(self) -> tuple[int, ...]:
        """For each network, the number of its loss scale."""
        count = len(self.optimizers)
        return tuple(range(count)) if self.has_own_scales else (0,) * count
