"""Checkpoints of earlier versions: what they did not save, and what they saved besides."""

from mindspore import ops

from ms_lossscale._values import as_array


class EarlierCheckpoints:
    """
    Completes checkpoints of earlier versions. It goes by the Parameters of the steps themselves and by their names,
    since a user's Parameter may have any name.
    """

    def __init__(self, transactions, counts):
        self._transactions = transactions
        self._counts = counts

    def completed(self, owner, own, parameters):
        """
        Returns a checkpoint with what versions 0.1 to 0.3 did not save, which is 0 between two cycles, and without what
        versions before 0.5 saved besides; `own` are the Parameters of the cell by name.
        """
        removed = self._names_of_removed() - own.keys()
        parameters = {name: value for name, value in parameters.items() if name not in removed}
        counters = [transaction.counters for transaction in self._transactions]
        if not any(
            of_step.skipped_steps.name in parameters and of_step.skip_reasons.name not in parameters
            for of_step in counters
        ):
            return parameters
        self._refuse_within_cycle(owner, parameters)
        for parameter in self._added():
            parameters.setdefault(parameter.name, ops.zeros_like(parameter))
        # What was copied for a cycle does not matter between two.
        for copy in self._copies():
            parameters.setdefault(copy.name, copy)
        of_copies = tuple(f"{prefix}forward_state." for prefix in self._prefixes())
        return {name: value for name, value in parameters.items() if name in own or not name.startswith(of_copies)}

    def _refuse_within_cycle(self, owner, parameters):
        for name in (count.value.name for count in self._counts):
            if name in parameters and as_array(parameters[name]) != 0:
                raise ValueError(
                    f"For '{owner}', {name!r} is {as_array(parameters[name])}: version 0.1 to 0.3 saved 'parameters' "
                    f"within an accumulation cycle, which this one can't go on with. Load a checkpoint from between "
                    f"two cycles. Nothing was loaded."
                )

    def _prefixes(self):
        return [prefix_of(transaction) for transaction in self._transactions]

    def _names_of_removed(self):
        roots = [clip.root.name for step in self._transactions for clip in step.update.clips if clip.norm is not None]
        scales = [root[: -len("root")] + "scale" for root in roots]
        shared = [f"{prefix}accumulation.wrote_shared" for prefix in self._prefixes()]
        return {*scales, *shared, *(transaction.counters.overflowed.name for transaction in self._transactions)}

    def _added(self):
        added = [count.length for count in self._counts]
        for transaction in self._transactions:
            added.append(transaction.counters.skip_reasons)
            if transaction.cycle is not None:
                added += [flag for flag in transaction.cycle.flags if flag is not transaction.cycle.overflow]
                added += [scaling.is_set for scaling in transaction.scales.scalings]
        return added

    def _copies(self):
        states = [transaction.forward_state for transaction in self._transactions]
        return [copy for state in states if state.cycle is not None for copy in state.copies_of_cycle]


def prefix_of(transaction):
    """Returns what the names of a step's own Parameters begin with."""
    return transaction.counters.skipped_steps.name[: -len("step_counters.skipped_steps")]
