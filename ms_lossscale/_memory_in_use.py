"""The memory that compiled code knows: that it is in use, and how Parameters that got another one get it back."""

from mindspore import ParameterTuple, Tensor, nn, ops

from ms_lossscale._mindspore import write_in_place


class MemoryInUse:
    """
    Gives Parameters the memory back that they had in the first step, with the values that they have got since; and a
    buffer that which a Parameter shares with it.

    `mindspore.load_param_into_net`, `Parameter.set_data` and what is made of them, in PyNative mode also
    `self.parameter = value` within a forward, give a Parameter other memory, and what `mindspore.jit` compiled goes on
    with the one that it knew.
    """

    def __init__(self, parameters, buffers=()):
        self._parameters = parameters
        self._buffers = buffers
        self._aliases = None
        self._addresses = None
        self._has_run = False

    def put_back(self):
        """Before each step. Costs 0.2 us for each Parameter."""
        if self._aliases is None:
            self._remember()
        moved = self._moved_back(lambda tensor: Tensor(tensor.asnumpy()))
        if moved:
            write_in_place(moved)

    def put_back_within_a_step(self):
        """The same after a forward, without waiting for the device."""
        for tensor, value in self._moved_back(ops.deepcopy):
            ops.assign(tensor, value)

    def settle(self, was_skipped):
        """
        After each step. In graph mode `setattr(self, name, value)` within a forward gives other memory, too, which
        compiled code does not put back. Whether the step was skipped is asked only where memory has moved.
        """
        moved = self._moved_back(ops.deepcopy)
        if moved and not was_skipped():
            write_in_place(moved)

    def has_run(self):
        """After each step. In PyNative mode the backward of MindSpore 2.7 itself gives some other memory, for good."""
        if not self._has_run:
            self._has_run = True
            self._addresses = list(map(Tensor.data_ptr, self._tensors()))

    def _moved_back(self, copy):
        """Pairs of the tensors that have been moved back, and a copy of what is to be written into them."""
        tensors = self._tensors()
        addresses = list(map(Tensor.data_ptr, tensors))
        if addresses == self._addresses:
            return []
        moved = [i for i, address in enumerate(addresses) if address != self._addresses[i]]
        values = [(tensors[i], copy(tensors[i])) for i in moved]
        for i in moved:
            tensors[i].assign_value(self._aliases[i])
        return values

    def _tensors(self):
        return [*self._parameters, *(buffer.registered() for buffer in self._buffers)]

    def _remember(self):
        # MindSpore 2.7 gives a tensor its memory when it is first used.
        write_in_place([(tensor, tensor) for tensor in self._tensors()])
        for buffer in self._buffers:
            buffer.share()
        # Other tensors of the same memory, which keep it; `parameter.value()` has a copy.
        self._aliases = list(map(Tensor, self._tensors()))
        self._addresses = list(map(Tensor.data_ptr, self._tensors()))


class UseInOutermostGraph(nn.Cell):
    """
    Makes the graph that it stands in use Parameters, at no cost. Where only a branch uses them, MindSpore goes on with
    the memory that they had when it compiled, although `mindspore.load_param_into_net`, say, gave them other memory.

    Args:
        parameters (list[Parameter]): All that the graph and its branches use.

    Inputs:
        - **inputs** (tuple) - What everything else is computed from.

    Outputs:
        tuple, the same.
    """

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        # Of a tuple: MindSpore would fold the dependence on a Parameter by itself away.
        self.parameters = ParameterTuple(parameters)

    def construct(self, inputs):
        return ops.depend(inputs, self.parameters)
