"""Builds a step, and checks what it is built of."""

import itertools

from mindspore import PYNATIVE_MODE, get_context, nn, ops

from ms_lossscale._mindspore import CompiledMethod, is_library_cell
from ms_lossscale.input_gradient import holds_input_gradient
from ms_lossscale.step.optimizers import updating
from ms_lossscale.step.step import ForwardBackward, ForwardsAndBackwards, SharedForwardBackward, Step
from ms_lossscale.step.transaction import Transaction


def build_step(
    owner,
    networks,
    optimizers,
    loss_scales,
    settings,
    ranks,
    *,
    network_inputs=None,
    may_return_tuple=False,
    prefix="",
    number=0,
):
    """
    Builds the step of N networks, or of one with N losses, and N optimizers, which share one overflow check and one
    conditional update. `loss_scales` is one, or a list with one for each; `prefix` and `number` are those of the step
    in its cell.
    """
    check_networks(owner, networks, loss_scales, settings)
    transaction = Transaction(owner, networks, optimizers, loss_scales, settings, ranks, prefix)
    weights = [optimizer.parameters for optimizer in optimizers]
    if len(networks) == len(weights):
        of_each = zip(networks, weights, settings.has_aux, settings.weighted)
        parts = [
            ForwardBackward(network, its, has_aux, owner, i, may_return_tuple, weighted)
            for i, (network, its, has_aux, weighted) in enumerate(of_each, number)
        ]
    else:
        parts = [SharedForwardBackward(networks[0], weights, settings.has_aux[0], owner)]
    # The losses that no scale takes part in, so that a lower one can't make them finite.
    pairs = zip(range(len(weights)), itertools.cycle(networks), itertools.cycle(transaction.loss_scales))
    transaction.unscaled_losses = tuple(i for i, its, scale in pairs if not holds_input_gradient((its,), scale))
    run = ForwardsAndBackwards(owner, parts, network_inputs, transaction)
    return Step(transaction, run, settings.max_retries, compiler(optimizers, transaction, settings))


def check_networks(owner, networks, loss_scales, settings):
    """Raises if networks or loss scales do not go together with the settings."""
    for _, cell in itertools.chain(*(network.cells_and_names() for network in networks)):
        if any(isinstance(each, ops.SparseGatherV2) for each in vars(cell).values()):
            raise ValueError(
                f"For '{owner}', all gradients must be dense, but a network has a '{type(cell).__name__}', whose "
                f"operator SparseGatherV2 makes sparse ones (RowTensor). Use nn.Embedding instead."
            )
    if any(settings.weighted) and len(networks) != len(settings.weighted):
        raise ValueError(
            f"For '{owner}', the argument 'weighted' must be False for one network that returns all losses, but got "
            f"{list(settings.weighted)}. Pass a list of networks, each of which returns (loss, weight)."
        )
    loss_scales = loss_scales if isinstance(loss_scales, list) else [loss_scales]
    if len({its.drop_overflow_update for its in loss_scales}) > 1:
        raise ValueError(
            f"For '{owner}', all loss scales must have the same 'drop_overflow_update', since there is one overflow "
            f"check, but got {[its.drop_overflow_update for its in loss_scales]}."
        )
    for its in loss_scales:
        if settings.max_retries and not (its.drop_overflow_update and its.backs_off):
            raise ValueError(
                f"For '{owner}', the argument 'max_retries' must be 0 with a loss scale that never backs off, since a "
                f"step would overflow again, but got {settings.max_retries} and a {type(its).__name__}. Pass a "
                f"DynamicLossScale, say."
            )
        its.fix("drop_overflow_update")


def compiler(optimizers, transaction, settings):
    """
    Returns the function that makes a method of a Cell one compiled graph in PyNative mode, as MindSpore's nn optimizers
    are there. If a cell is the user's own, or an optimizer reads its settings in each step, they run in Python.
    """
    optimizers = [updating(optimizer) for optimizer in optimizers]
    transforms = itertools.chain(*settings.gradient_transforms)
    cells = (*optimizers, *transaction.loss_scales, transaction.detector, *settings.skip_conditions, *transforms)
    in_python = (
        settings.after_update is not None
        or not all(isinstance(optimizer, nn.Optimizer) for optimizer in optimizers)
        or not all(map(is_library_cell, cells))
    )
    if get_context("mode") == PYNATIVE_MODE and not in_python:
        return CompiledMethod
    # In graph mode, a Cell that Python calls is compiled, and a method is not.
    return lambda method: method.__self__ if method.__name__ == "construct" else method
