"""Registered buffers, as compiled code can write them."""

from mindspore import Parameter, Tensor


class SharedBuffer:
    """
    A registered buffer, and a Parameter that shares its memory: compiled code reads a buffer as the constant that it
    was, but not a Parameter.

    Args:
        name (str): For the Parameter.
        buffer (Tensor): The buffer.
        cell (Cell): Where it is registered.
        attribute (str): And under which name.
    """

    def __init__(self, name, buffer, cell, attribute):
        self._cell, self._attribute = cell, attribute
        self.parameter = Parameter(Tensor(buffer.asnumpy()), name=name, requires_grad=False)
        self.share()

    def registered(self):
        """The buffer that is registered now."""
        return getattr(self._cell, self._attribute)

    def share(self):
        """Before the first step: pretrained values may have come with memory of their own."""
        self.parameter.assign_value(self.registered())
