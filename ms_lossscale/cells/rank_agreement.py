"""What the ranks of a data-parallel job must have in common: communication, and one and the same training cell."""

import hashlib
import json
import numbers
import zlib

import numpy as np
from mindspore import GRAPH_MODE, Tensor, get_auto_parallel_context, get_context, nn, ops
from mindspore import dtype as mstype
from mindspore.communication import GlobalComm, get_group_size, get_rank

_SHOWN = 4


class RankAgreement(nn.TrainOneStepCell):
    """
    Base class of the training cells: with ``parallel_mode="data_parallel"`` or ``"hybrid_parallel"`` the ranks compare
    their cells before the first step. Ranks that differ would wait for each other for ever, or train apart in silence.

    A subclass gives `rank_settings()`, a dict of what was passed to it, and `rank_state()`, Parameters of one or few
    elements that have the same values on all ranks.

    Args:
        owner (str): The name of the user's cell, for error messages.
        networks (tuple[Cell]): The networks.
        optimizer (Cell): The optimizer, or all of them in one.
    """

    def __init__(self, owner, networks, optimizer):
        mode = get_auto_parallel_context("parallel_mode")
        if mode in ("data_parallel", "hybrid_parallel") and not GlobalComm.INITED:
            raise RuntimeError(
                f"For '{owner}', the parallel_mode is '{mode}', but communication is not initialised, so that the "
                f"ranks could exchange no gradients. Call mindspore.communication.init() before the cell is "
                f"constructed, and start the script with msrun; or train alone, with "
                f"mindspore.set_auto_parallel_context(parallel_mode='stand_alone')."
            )
        super().__init__(
            networks[0] if len(networks) == 1 else nn.CellList(list(networks), auto_prefix=False), optimizer
        )
        self._compared = not self.reducer_flag

    def __call__(self, *args, **kwargs):
        if not self._compared:
            self.compare_ranks()
        return super().__call__(*args, **kwargs)

    def compare_ranks(self):
        """
        Compares this cell with those of the other ranks: settings, weights, loss scale and counters.

        The first call of the cell does it. Only where MindSpore compiles the cell into another one (in GRAPH_MODE: a
        cell of your own that calls it, or `dataset_sink_mode` on a device) nobody does, unless all ranks call this
        method before.

        Raises:
            ValueError: On all ranks, if one of them differs from rank 0. The message names the differences.
        """
        if self.reducer_flag:
            _compare(type(self).__name__, self._settings_and_state())
        self._compared = True

    def _settings_and_state(self):
        graph_mode = get_context("mode") == GRAPH_MODE
        settings = {
            "cell": type(self).__name__,
            "mode": "GRAPH_MODE" if graph_mode else "PYNATIVE_MODE",
            "parallel_mode": self.parallel_mode,
            "gradients_mean": self.mean,
            **self.rank_settings(),
        }
        # Only in GRAPH_MODE MindSpore heeds it.
        broadcasts = graph_mode and get_auto_parallel_context("parameter_broadcast")
        for i, weight in enumerate(self.weights):
            settings[f"weight {i}"] = f"{weight.name}, {weight.dtype}, {weight.shape}"
            # Weights that are a rank's own, or that rank 0 is going to send to the others, may differ.
            if not (weight.layerwise_parallel or broadcasts):
                values = weight.astype(mstype.float32).asnumpy()
                settings[f"the values of {weight.name}"] = f"CRC {zlib.crc32(values.tobytes()):08x}"
        settings.update((parameter.name, parameter.asnumpy().tolist()) for parameter in self.rank_state())
        return settings


def settings_of(cell):
    """The numbers, and lists of them, that a cell keeps of its arguments, by name."""
    settings = {"class": type(cell).__name__}
    common = vars(nn.Cell())
    for name, value in vars(cell).items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if name not in common and all(isinstance(each, numbers.Real) for each in values):
            settings[name.lstrip("_")] = value
    return settings


def _compare(owner, settings):
    text = json.dumps(settings).encode()
    summary = np.frombuffer(hashlib.sha256(text).digest(), np.int32)
    # Rows of one length first, so that nothing has to be agreed on before.
    summaries = _gather(np.append(summary, np.int32(len(text))))
    different = np.flatnonzero((summaries != summaries[0]).any(axis=1)).tolist()
    if different:
        ranks = [0, different[0]]
        texts = _texts_of(ranks, text, summaries[ranks, -1])
        raise ValueError(_message(owner, different, *map(json.loads, texts)))


def _gather(row):
    return ops.AllGather()(Tensor(row.reshape(1, -1))).asnumpy().reshape(get_group_size(), -1)


def _texts_of(ranks, text, lengths):
    # Two rows, however many ranks there are. Summed as float32, which every device can, and in which a byte is exact.
    rows = np.zeros((len(ranks), max(lengths)), np.float32)
    if get_rank() in ranks:
        rows[ranks.index(get_rank()), : len(text)] = np.frombuffer(text, np.uint8)
    rows = ops.AllReduce()(Tensor(rows)).asnumpy().astype(np.uint8)
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths)]


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
