"""The moving averages of weights that several steps train with one optimizer."""

from ms_lossscale._memory_in_use import hide_all_parameters


def share_averages(owner, transactions, decays):
    """
    Lets steps of one optimizer, of which each has averages of its weights, move the same ones, which begin at the first
    of their steps that is applied. Raises unless they have the same decay.
    """
    of_optimizers = {}
    for transaction, decay in zip(transactions, decays):
        if decay is not None:
            (optimizer,) = transaction.update.optimizers.optimizers
            of_optimizers.setdefault(id(optimizer), []).append((transaction, decay))
    for steps in of_optimizers.values():
        if len({decay for _, decay in steps}) > 1:
            raise ValueError(
                f"For '{owner}', networks with one optimizer have one average of its weights, and the argument "
                f"'ema_decay' must be the same for them, or None, but got {[decay for _, decay in steps]}."
            )
        first, _ = steps[0]
        for transaction, _ in steps:
            others = [other.counters for other, _ in steps if other is not transaction]
            transaction.update.averages = first.update.averages
            transaction.counters.count_with(others)
            hide_all_parameters(transaction)
