"""What a monitor keeps of a step until it reads it."""

import itertools
import operator
from collections import Counter
from typing import NamedTuple, Optional

import numpy as np

from ms_lossscale import _primitives as prim
from ms_lossscale._words import Values
from ms_lossscale.step.counters import EVENTS


class StepState(NamedTuple):
    """What a snapshot holds, on the host."""

    applied_steps: int
    skipped_steps: int
    consecutive_skipped_steps: int
    # How often each event has happened in this process.
    events: Counter
    # Whose gradients were not finite in the last step that was skipped.
    overflowed: np.ndarray
    loss_scales: Values
    # The global norms at the last check, one for each network; None if nothing is measured.
    norms: Optional[Values]
    dropped_calls: int = 0
    # How many calls the present accumulation cycle has had.
    calls: int = 0
    # The mean loss of the last cycle, None if it is not known.
    mean_loss: Optional[float] = None
    # At which scales the call began that was retried last.
    retried_at: Values = Values()


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
        measured = transaction.norms.measured()
        self._is_measured = [norm in measured for norm in transaction.norms.of_network]
        self._numbers = {
            "loss_scales": [loss_scale.scale_value for loss_scale in transaction.scales.loss_scales],
            "roots": [norm.root for norm in measured],
            "powers": [norm.power for norm in measured],
        }
        if counters.counts_dropped:
            self._counts["dropped_calls"] = counters.dropped_calls
        if counters.counts_retries:
            self._numbers["retried_at"] = list(transaction.scales.retried_call_began_at)
        cycle = transaction.cycle
        if cycle is not None:
            self._counts["calls"] = cycle.count.value
            self._counts["knows_mean"] = cycle.knows_last_mean
            self._numbers["mean_loss"] = [cycle.last_mean_loss]

    def take(self):
        """Returns copies, on the device, of what the next step will change: counts, numbers, and two of arrays."""
        return (
            prim.stack(tuple(self._counts.values())),
            prim.stack(tuple(itertools.chain(*self._numbers.values()))),
            prim.deepcopy(self._counters.events),
            prim.deepcopy(self._counters.overflowed),
        )

    def read(self, snapshot):
        """Returns what it holds, as a StepState."""
        counts, numbers, events, overflowed = (copy.asnumpy() for copy in snapshot)
        counts = dict(zip(self._counts, counts.tolist()))
        values = iter(numbers.tolist())
        numbers = {name: Values(itertools.islice(values, len(its))) for name, its in self._numbers.items()}
        norms = map(operator.truediv, numbers.pop("roots"), numbers.pop("powers"))
        norms = Values(next(norms) if is_measured else None for is_measured in self._is_measured)
        (mean_loss,) = numbers.pop("mean_loss", (None,))
        return StepState(
            mean_loss=mean_loss if counts.pop("knows_mean", False) else None,
            **counts,
            **numbers,
            events=Counter(dict(zip(EVENTS, events.tolist()))),
            overflowed=overflowed,
            norms=norms if any(self._is_measured) else None,
        )
