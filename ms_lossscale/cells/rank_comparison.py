"""What the ranks of a parallel job must have in common: communication, and equal training cells."""

import hashlib
import json
import numbers
import zlib

import numpy as np
from mindspore import GRAPH_MODE, Tensor, get_auto_parallel_context, get_context, nn, ops
from mindspore import dtype as mstype
from mindspore.communication import GlobalComm, get_group_size

from ms_lossscale._mindspore import is_library_cell
from ms_lossscale._user_warnings import warn_user
from ms_lossscale.step.optimizers import network_prefix, updating
from ms_lossscale.step.settings import as_json

_SHOWN = 4


def compare_ranks(cell):
    """Raises a ValueError on all ranks if the training cell differs from that of another rank."""
    if cell.reducer_flag:
        _compare(type(cell).__name__, _described(cell))


def _described(cell):
    graph_mode = get_context("mode") == GRAPH_MODE
    described = {
        "cell": type(cell).__name__,
        "mode": "GRAPH_MODE" if graph_mode else "PYNATIVE_MODE",
        "parallel_mode": cell.parallel_mode,
        "gradients_mean": cell.mean,
        **cell._described_networks(),
    }
    for i, (step, settings) in enumerate(zip(cell.steps, cell._settings)):
        prefix = network_prefix(i) if cell.each_decides else ""
        optimizers = [type(updating(optimizer)).__name__ for optimizer in step.transaction.optimizers.optimizers]
        its = {"optimizers": optimizers, **as_json(settings)}
        # The detector in use: it is NoCheck if nothing is checked.
        its["overflow_detector"] = type(step.transaction.detector).__name__
        for j, condition in enumerate(settings.skip_conditions):
            # What users' own conditions keep may differ.
            if is_library_cell(condition):
                its.update((f"skip_conditions[{j}].{name}", value) for name, value in _settings_of(condition).items())
        described.update((f"{prefix}{name}", value) for name, value in its.items())
    for i, loss_scale in enumerate(cell._loss_scales):
        prefix = network_prefix(i) if cell.each_has_scale else ""
        described.update((f"{prefix}loss_scale.{name}", value) for name, value in _settings_of(loss_scale).items())
    # MindSpore uses it only in GRAPH_MODE.
    broadcasts = graph_mode and get_auto_parallel_context("parameter_broadcast")
    weights = [weight for step in cell.steps for weight in step.transaction.optimizers.parameters]
    described.update(_described_weights(weights, broadcasts))
    described.update((parameter.name, parameter.asnumpy().tolist()) for parameter in _shared_state(cell))
    return described


def _shared_state(cell):
    """Returns the small Parameters that must have the same values on all ranks."""
    parameters = cell._shared_state()
    for step, settings in zip(cell.steps, cell._settings):
        parameters += step.transaction.shared_state()
        for condition in filter(is_library_cell, settings.skip_conditions):
            parameters += condition.get_parameters()
    return parameters


def check_parallel(owner, settings):
    """Raises if ranks can't exchange anything, or if a setting is not possible with sharded weights."""
    mode = get_auto_parallel_context("parallel_mode")
    is_reduced = any(its.gradients_reduced for its in settings)
    if mode == "stand_alone" and not is_reduced:
        _warn_of_training_apart(owner)
        return
    if not GlobalComm.INITED:
        if is_reduced:
            raise RuntimeError(
                f"For '{owner}', the argument 'gradients_reduced' is {settings[0].gradients_reduced!r}, but "
                f"communication is not initialised, so that the ranks could not agree on an overflow. Call "
                f"mindspore.communication.init() before the cell is constructed, and start the script with msrun; or "
                f"leave the argument out to train alone."
            )
        raise RuntimeError(
            f"For '{owner}', the parallel_mode is '{mode}', but communication is not initialised, so that the "
            f"ranks could exchange no gradients. Call mindspore.communication.init() before the cell is "
            f"constructed, and start the script with msrun; or train alone, with "
            f"mindspore.set_auto_parallel_context(parallel_mode='stand_alone')."
        )
    if not _shards_weights(mode):
        return
    stages = get_auto_parallel_context("pipeline_stages")
    if stages > 1:
        raise ValueError(
            f"For '{owner}', pipeline stages are not supported, but pipeline_stages is {stages}. Train with one stage, "
            f"or with MindSpore's own cells."
        )
    for its in settings:
        for name, is_set in (
            ("gradient_accumulation_steps", its.gradient_accumulation_steps > 1),
            ("ema_decay", any(decay is not None for decay in its.ema_decay)),
        ):
            if is_set:
                raise ValueError(
                    f"For '{owner}', the argument '{name}' is not supported with parallel_mode='{mode}', which shards "
                    f"weights, but not what the cell would keep for each of them. Leave it out, or train with "
                    f"parallel_mode='data_parallel'."
                )
        if any(its.weighted):
            check_weight(owner, "weighted", mode)


def check_weight(owner, name, parallel_mode):
    """Raises if a loss can't have a weight, which an argument of this name asks for, with the parallel mode."""
    if _shards_weights(parallel_mode):
        raise ValueError(
            f"For '{owner}', the argument '{name}' is not supported with parallel_mode='{parallel_mode}', in which a "
            f"network's loss and its weight are those of the batches of all ranks already: adding the weights of all "
            f"ranks would count each several times. Return the loss divided by its weight, or train with "
            f"parallel_mode='data_parallel'."
        )


def _shards_weights(parallel_mode):
    return parallel_mode not in ("stand_alone", "data_parallel", "hybrid_parallel")


def _warn_of_training_apart(owner):
    if GlobalComm.INITED and get_group_size() > 1:
        warn_user(
            f"For '{owner}', there are {get_group_size()} ranks, but the parallel_mode is 'stand_alone', so that they "
            f"train apart. If something else reduces their gradients (hooks on the weights, DistributedDataParallel, "
            f"fully_shard), pass gradients_reduced=True, so that all ranks agree on an overflow. Else set the mode "
            f"before the cell is constructed: mindspore.set_auto_parallel_context(parallel_mode='data_parallel', "
            f"gradients_mean=True)."
        )


def _described_weights(weights, are_broadcast):
    """Returns the weights by name, with a checksum of values that must be the same on all ranks."""
    described = {}
    for i, weight in enumerate(weights):
        described[f"weight {i}"] = f"{weight.name}, {weight.dtype}, {weight.shape}"
        # Weights that each rank has its own part of, or that rank 0 will send to the others, may differ.
        if not (weight.layerwise_parallel or are_broadcast):
            values = weight.astype(mstype.float32).asnumpy()
            described[f"the values of {weight.name}"] = f"CRC {zlib.crc32(values.tobytes()):08x}"
    return described


def _settings_of(cell):
    """Returns the numbers, and lists of numbers, that a cell keeps of its arguments, by name."""
    settings = {"class": type(cell).__name__}
    common = vars(nn.Cell())
    for name, value in vars(cell).items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if name not in common and values and all(isinstance(each, numbers.Real) for each in values):
            settings[name.lstrip("_")] = value
    return settings


def _compare(owner, settings):
    """Compares a dict with those of the other ranks, see :meth:`TrainingCell.compare_ranks`."""
    text = json.dumps(settings).encode()
    summary = np.frombuffer(hashlib.sha256(text).digest(), np.int32)
    # Rows of a fixed length come first, so that the ranks need not agree on a length.
    row = np.append(summary, np.int32(len(text))).reshape(1, -1)
    summaries = ops.AllGather()(Tensor(row)).asnumpy()
    different = np.flatnonzero((summaries != summaries[0]).any(axis=1)).tolist()
    if different:
        first, other = (json.loads(_text_of(rank, text, summaries[rank, -1])) for rank in (0, different[0]))
        raise ValueError(_message(owner, different, first, other))


def _text_of(rank, text, length):
    # Only that rank's bytes count, but all must pass equally many.
    row = np.frombuffer(text[:length].ljust(length), np.uint8).astype(np.int32)
    return ops.Broadcast(rank)((Tensor(row),))[0].asnumpy().astype(np.uint8).tobytes()


def _message(owner, different, first, other):
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    differences = [
        f"{name}: {first.get(name, 'nothing')!s} on rank 0, {other.get(name, 'nothing')!s} on rank {different[0]}"
        for name in names[:_SHOWN]
    ]
    if len(names) > _SHOWN:
        differences.append(f"and {len(names) - _SHOWN} more")
    who = f"rank {different[0]} differs" if len(different) == 1 else f"ranks {', '.join(map(str, different))} differ"
    cure = "Pass the same arguments on every rank."
    if any(name.startswith("the values of") for name in names):
        cure += (
            " So that they start with the same weights, call mindspore.set_seed with the same seed before the network "
            "is built, or load the same checkpoint."
        )
    return f"For '{owner}', all ranks must train the same cell, but {who} from rank 0. {'; '.join(differences)}. {cure}"
