"""What a monitor keeps of a step until it reads it."""

from typing import NamedTuple, Optional

import numpy as np
from mindspore import Tensor

from ms_lossscale import _primitives as prim
from ms_lossscale._output import LossScaleValues


class Snapshot(NamedTuple):
    """Copies, on the device, of what the next step will change."""

    counts: Tensor
    numbers: Tensor
    skip_reasons: Tensor
    overflowed: Tensor


class StepState(NamedTuple):
    """What a snapshot holds, on the host."""

    applied_steps: int
    skipped_steps: int
    consecutive_skipped_steps: int
    skip_reasons: np.ndarray
    # Whose gradients were not finite in the last step that was skipped.
    overflowed: np.ndarray
    loss_scales: LossScaleValues
    # The global norms at the last check, one for each network whose norm is measured.
    norms: tuple[float, ...]
    retries: int = 0
    dropped_calls: int = 0
    # How many calls the present accumulation cycle has had.
    calls: int = 0
    # For each network, the sum of its losses' weights in the present cycle, and in the last one that ended; None if
    # every loss counts alike.
    weights: Optional[np.ndarray] = None
    weights_of_last_cycle: Optional[np.ndarray] = None

    @property
    def steps(self):
        """How many steps there were."""
        return self.applied_steps + self.skipped_steps


class Snapshots:
    """Takes snapshots of a transaction by four operators, for which the host does not wait, and reads them."""

    def __init__(self, transaction):
        counters = transaction.counters
        self._counters = counters
        self._counts = {
            "applied_steps": counters.applied_steps,
            "skipped_steps": counters.skipped_steps,
            "consecutive_skipped_steps": counters.consecutive_skipped_steps,
        }
        if counters.counts_retries:
            self._counts["retries"] = counters.retries
        if counters.counts_dropped:
            self._counts["dropped_calls"] = counters.dropped_calls
        measured = [clip for clip in transaction.update.clips if clip.norm is not None]
        self._numbers = {
            "loss_scales": [loss_scale.scale_value for loss_scale in transaction.scales.loss_scales],
            "roots": [clip.root for clip in measured],
            "powers": [clip.power for clip in measured],
        }
        cycle = transaction.cycle
        if cycle is not None:
            self._counts["calls"] = cycle.count.value
            if cycle.weights is not None:
                self._numbers["weights"] = list(cycle.weights)
                self._numbers["weights_of_last_cycle"] = list(cycle.weights_of_last_cycle)

    def take(self):
        """Returns a snapshot."""
        return Snapshot(
            counts=prim.stack(tuple(self._counts.values())),
            numbers=prim.stack(tuple(parameter for part in self._numbers.values() for parameter in part)),
            skip_reasons=prim.deepcopy(self._counters.skip_reasons),
            overflowed=prim.deepcopy(self._counters.overflowed),
        )

    def read(self, snapshot):
        """Returns what it holds, as a StepState."""
        counts = dict(zip(self._counts, snapshot.counts.asnumpy().tolist()))
        values = iter(snapshot.numbers.asnumpy().tolist())
        numbers = {name: [next(values) for _ in part] for name, part in self._numbers.items()}
        norms = tuple(root / power for root, power in zip(numbers.pop("roots"), numbers.pop("powers")))
        loss_scales = LossScaleValues(numbers.pop("loss_scales"))
        return StepState(
            **counts,
            skip_reasons=snapshot.skip_reasons.asnumpy(),
            overflowed=snapshot.overflowed.asnumpy(),
            loss_scales=loss_scales,
            norms=norms,
            **{name: np.array(weights) for name, weights in numbers.items()},
        )
