"""What happened in which order in a step, also in compiled code, and though it is undone."""

from mindspore import ops


class Events:
    """Operators that run Python, which writes down that they ran."""

    def __init__(self):
        self.happened = []

    def operator(self, event):
        def function(x):
            self.happened.append(event)
            return x

        return ops.Custom(function, lambda x: x, lambda x: x, func_type="pyfunc")
