"""The loss scale of a step as text: one number, or where each network has its own, one for each."""


class LossScaleValues(tuple):
    """Floats, written as ``65536``, or as ``65536/4096`` where there are several."""

    def __format__(self, spec):
        return "/".join(format(value, spec) for value in self)

    def __str__(self):
        return "/".join(map(str, self))
