"""What was found so far: what is written, and what could not be decided."""

from mindspore import nn

from ms_lossscale.forward_writes.mindspore_internals import frozen_state_of
from ms_lossscale.forward_writes.values import flat, is_state


class Findings:
    """Parameters and buffers by identity; of the undecided ones with the first reason."""

    def __init__(self):
        self.written, self.undecided = {}, {}

    def write(self, values):
        """Notes what an assignment changes: a Parameter or a buffer itself, not what a list holds."""
        self.write_all(values.values())

    def write_all(self, things):
        for thing in things:
            if is_state(thing):
                self.written.setdefault(id(thing), thing)

    def doubt(self, values, why):
        """Notes what the values hold, and what a cell among them has itself."""
        for thing in flat(values).values():
            for state in frozen_state_of(thing) if isinstance(thing, nn.Cell) else [thing]:
                if is_state(state):
                    self.undecided.setdefault(id(state), (state, why))
