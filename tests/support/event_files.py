"""Reads scalars back from event files of MindSpore's SummaryRecord and of TensorBoard."""

import struct

from mindspore.train import summary_pb2
from tensorboardX.proto import event_pb2


def scalars_for_mindinsight(folder):
    """Returns the scalars of each step by their tags."""
    return _scalars(folder.glob("*events.summary*_MS"), summary_pb2.Event, "scalar_value")


def scalars_for_tensorboard(folder):
    """Returns the scalars of each step by their tags."""
    return _scalars(folder.glob("*tfevents*"), event_pb2.Event, "simple_value")


def _scalars(paths, event_type, value_name):
    of_steps = {}
    for path in paths:
        for data in _records(path.read_bytes()):
            event = event_type.FromString(data)
            for value in event.summary.value:
                of_steps.setdefault(event.step, {})[value.tag] = getattr(value, value_name)
    return of_steps


def _records(data):
    """Yields the records, which are framed by their length, its checksum and their own checksum."""
    start = 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        yield data[start + 12 : start + 12 + length]
        start += 12 + length + 4
