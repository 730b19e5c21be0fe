"""Training on one or several ranks: what changes in a script if msrun starts it."""

import os
from typing import NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import get_group_size, get_rank, init

from common.input_error import InputError
from common.options import MODES


class Ranks(NamedTuple):
    """This process as one of `count` that train together."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self):
        """Whether this rank prints, draws and writes."""
        return self.rank == 0

    def share(self, batch):
        """Returns this rank's part of a step's inputs. All ranks get equally many."""
        size = len(batch) // self.count
        return batch[self.rank * size : (self.rank + 1) * size]

    def mean(self, values):
        """Returns the means over the ranks of an array or list of numbers, in float32. All ranks must call it."""
        values = np.asarray(values, np.float32)
        if self.count == 1:
            return values
        return ops.AllReduce()(Tensor(values)).asnumpy() / self.count

    def wait(self):
        """Waits until all ranks are here. MindSpore has no barrier on CPU."""
        self.mean([0.0])


def start_ranks(args):
    """
    Sets the device, the mode and the seed, and joins the other ranks if msrun has started this script. Training cells
    that are constructed from then on average their gradients over all ranks.

    Args:
        args (argparse.Namespace): The script's options.

    Returns:
        Ranks.

    Raises:
        InputError: If there is no such device, or the ranks can't share a batch of this size.
    """
    try:
        mindspore.set_device(args.device)
    except RuntimeError as error:
        raise InputError(f"--device {args.device}: {str(error).splitlines()[0]}") from None
    mindspore.set_context(mode=MODES[args.mode])
    mindspore.set_seed(args.seed)
    # msrun sets this for each process. One process is its scheduler, which never returns from init.
    if "MS_ROLE" not in os.environ:
        return Ranks()
    count = int(os.environ["MS_WORKER_NUM"])
    if args.batch_size % count:
        raise InputError(
            f"--batch-size {args.batch_size} can't be shared by {count} ranks: choose a multiple of {count}"
        )
    init()
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    return Ranks(get_rank(), get_group_size())


def finish_ranks():
    """Ends the parallel part: what follows, the first rank does alone."""
    mindspore.reset_auto_parallel_context()


def is_first_process():
    """Returns whether this process prints, even before it has joined the others."""
    return os.environ.get("MS_ROLE", "MS_WORKER") == "MS_WORKER" and os.environ.get("RANK_ID", "0") == "0"
