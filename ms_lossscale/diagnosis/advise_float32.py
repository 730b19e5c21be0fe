"""Advises which cells of a float16 network need float32."""

from collections.abc import Sequence
from typing import Optional, Union

import mindspore
from mindspore import Parameter

from ms_lossscale._arguments import Batches
from ms_lossscale._mindspore import is_cast
from ms_lossscale.cells.training_cell import TrainingCell
from ms_lossscale.diagnosis.arguments import CASTS_BY_HAND, each_batch, not_finite_weights_of, trained_parts
from ms_lossscale.diagnosis.float32_advice import Float32Advice, NeedOfFloat32
from ms_lossscale.diagnosis.float32_search import needed_cells, widening
from ms_lossscale.diagnosis.float32_trials import NotFinite, Trials
from ms_lossscale.diagnosis.register_watch import cleared_afterwards, register_of
from ms_lossscale.diagnosis.replay import replay
from ms_lossscale.function_network import Network


def advise_float32(
    network: Network,
    parameters: Union[Sequence[Parameter], Batches, None] = None,
    batches: Optional[Batches] = None,
) -> Float32Advice:
    """
    Finds which cells of a float16 network must compute in float32 so that your batches have finite losses and gradients
    at a loss scale of 1 or more. If a training cell has a smaller `min_loss_scale`, that is the limit.

    It looks for as few and as small cells as possible, by trying: it begins with the whole network in float32, and
    goes on to the cells inside, and to those inside them, as long as some of them suffice. A cell also counts if
    float16 loses its output because of a division by infinity, as in a normalization whose squares overflow: the output
    is then zero. This takes tens of runs of the batches, forward and backward in PyNative mode, and one compilation,
    because the result must also hold in graph mode. A few batches are enough.

    If one loss scale can't serve the whole network, because gradients are lost even at the largest one, the advice
    names one more cell: the one that widens the range of scales most if it computes in float32.

    A cell in float32 casts its inputs to float32 and computes in float32, as with `cell.to_float(mindspore.float32)` .
    The float16 cells around it cast its output back. Its weights keep their dtype.

    Nothing changes: not the network, its optimizer, the loss scale, the counters, BatchNorm's statistics or MindSpore's
    mode. Only dropout goes on with other random numbers if training itself runs in PyNative mode.

    A training cell of this package knows its networks and weights: ``advise_float32(cell, batches)`` .

    Args:
        network (Union[Cell, Callable]): Returns the loss, as :class:`mindspore.nn.WithLossCell` does; or a training
            cell; or a function, as for :func:`profile_gradients`.
        parameters (list[Parameter], optional): The parameters to differentiate with respect to. Leave it out for a
            training cell. Default: ``None`` , all trainable ones.
        batches (iterable): A tuple of the network's inputs for each batch; or a dataset. They are kept in memory.

    Returns:
        Float32Advice.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If there are no batches, or `parameters` is empty or not the network's.
        RuntimeError: If the network fails on a batch, or returns no loss.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore import dtype as mstype
        >>> from ms_lossscale import advise_float32
        >>> layers = [nn.Dense(2, 2, weight_init="ones", has_bias=False), nn.LayerNorm((2,))]
        >>> net = nn.SequentialCell(*layers).to_float(mstype.float16)
        >>> network = nn.WithLossCell(net, nn.MSELoss())
        >>> batch = np.full((4, 2), 4e4, np.float32), np.zeros((4, 2), np.float32)
        >>> advice = advise_float32(network, net.trainable_params(), [batch])
        >>> advice.cells, advice.holds
        (['_backbone.0', '_backbone.1'], True)
        >>> advice.apply()
    """
    owner = "advise_float32"
    if batches is None and isinstance(network, TrainingCell):
        parameters, batches = None, parameters
    parts = trained_parts(owner, network, parameters)
    batches = list(each_batch(owner, batches))
    in_graph_mode = mindspore.get_context("mode") == mindspore.GRAPH_MODE
    detector = register_of(network)
    if not isinstance(network, TrainingCell):
        network = parts[0].network
    with replay(owner, parts) as replayed, cleared_afterwards(detector):
        trials = Trials(owner, replayed, batches, min(part.floor for part in parts), detector)
        return _advice(network, trials, in_graph_mode, not_finite_weights_of(parts))


def _advice(network, trials, in_graph_mode, weights):
    if not (trials.are_finite([]) or trials.are_finite(trials.roots)):
        return _no_help(network, trials, trials.roots, weights)
    names, error = needed_cells(trials)
    if trials.first_lost(names) is not None and trials.first_lost(trials.roots) is None:
        trials.counts_lost = True
        names, error = needed_cells(trials)
    if in_graph_mode and isinstance(error, NotFinite):
        # Only PyNative mode casts back what is cast in a construct.
        return _no_help(network, trials, [], weights)
    needs = _needs(trials, names)
    loss_scale = trials.largest_scale(names, in_graph_mode and error is None)
    further = widening(trials, names, loss_scale)
    notes = [] if names else _casts_that_stay(trials)
    if isinstance(error, NotFinite):
        notes.append(f"This holds in PyNative mode only: in graph mode, {error}. {CASTS_BY_HAND}")
    elif error is not None:
        notes.append(f"It was tried in PyNative mode only, since graph mode said: {error}")
    cells = {name: trials.cells[name] for name in names}
    note = "\n".join(notes)
    parts = network, cells, len(trials.cells), loss_scale, needs, trials.runs, None, further, note, weights
    return Float32Advice(*parts, trials.unreached(), trials.in_register(names))


def _no_help(network, trials, names, weights):
    """Returns the advice for a network that float32 does not help, with what overflows if these are in float32."""
    found = trials.look(names)
    line = found and trials.line(found, names)
    trace, notes = found and found.trace, [f"  at {line}"] if line else []
    note = "\n".join(notes if weights else notes + _casts_that_stay(trials, trace))
    return Float32Advice(network, {}, len(trials.cells), None, [], trials.runs, trace, None, note, weights)


def _casts_that_stay(trials, trace=None):
    """Returns a list of what to say about casts that can't be switched, given what overflows in float32."""
    if not any(map(is_cast, trials.cells.values())):
        return [f"No cell is cast by to_float or mindspore.amp, so that none could be switched. {CASTS_BY_HAND}"]
    is_made_there = trace is not None and not any(each.non_finite for each in trace.inputs)
    return [CASTS_BY_HAND] if is_made_there else []


def _needs(trials, names):
    """Returns for each of the cells why it needs float32."""
    if not names:
        return []
    largest, needs, lines = trials.largest_values(names), [], {}
    for name in names:
        rest, kind = [each for each in names if each != name], trials.kind(name)
        found = trials.look(rest)
        value = largest.get((found.trace.direction, found.cell), 0.0)
        # Cells of one kind have the same line.
        if kind not in lines:
            lines[kind] = trials.line(found, rest)
        needs.append(NeedOfFloat32(name, kind, found.trace, value, lines[kind]))
    return needs
