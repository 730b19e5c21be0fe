"""Values that are loaded into a cell which has already run."""

from mindspore import Tensor

from ms_lossscale._write_in_place import write_in_place


class MemoryInUse:
    """
    Gives Parameters the memory back that they had in the first step, with the values that they have got since; and a
    buffer that which a Parameter shares with it.

    `mindspore.load_param_into_net`, `Parameter.set_data` and what is made of them give a Parameter other memory, and
    what `mindspore.jit` compiled goes on with the one that it knew.

    Args:
        parameters (list[Parameter]): All that the training cell has, in PyNative mode.
        buffers (list[SharedBuffer]): What its networks' forward writes besides, in either mode.
    """

    def __init__(self, parameters, buffers):
        self._parameters = parameters
        self._buffers = buffers
        self._aliases = None
        self._addresses = None
        self._has_run = False

    def put_back(self):
        """Before each step. Costs 0.2 us for each Parameter."""
        if self._aliases is None:
            self._remember()
        tensors = self._tensors()
        addresses = list(map(Tensor.data_ptr, tensors))
        if addresses == self._addresses:
            return
        moved = [i for i, address in enumerate(addresses) if address != self._addresses[i]]
        values = [(tensors[i], Tensor(tensors[i].asnumpy())) for i in moved]
        for i in moved:
            tensors[i].assign_value(self._aliases[i])
        write_in_place(values)

    def has_run(self):
        """After each step. In PyNative mode the backward of MindSpore 2.7 itself gives some other memory, for good."""
        if not self._has_run:
            self._has_run = True
            self._addresses = list(map(Tensor.data_ptr, self._tensors()))

    def _tensors(self):
        return [*self._parameters, *(buffer.registered() for buffer in self._buffers)]

    def _remember(self):
        # MindSpore 2.7 gives a tensor its memory when it is first used.
        write_in_place((tensor, tensor) for tensor in self._tensors())
        for buffer in self._buffers:
            buffer.share()
        # Other tensors of the same memory, which keep it; `parameter.value()` has a copy.
        self._aliases = list(map(Tensor, self._tensors()))
        self._addresses = list(map(Tensor.data_ptr, self._tensors()))
