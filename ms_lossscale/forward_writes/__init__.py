"""Which Parameters and buffers a network's forward may write, found by reading its source. Nothing is run."""

from ms_lossscale.forward_writes.find import ForwardWrites as ForwardWrites
from ms_lossscale.forward_writes.find import find_forward_writes as find_forward_writes
