"""What a training cell refuses: to be trained, and to predict."""

from mindspore import nn


class TrainsOnly(nn.Cell):
    """
    Refuses to be part of another training step, and to predict, since either would silently make a step. Model
    announces both to the network that it calls by `set_grad`: before `Model.predict`, with False.
    """

    # The mode before the last `set_train(False)`, which is undone if Model.predict called it.
    _mode_before = None

    def set_train(self, mode: bool = True) -> nn.Cell:
        # MindSpore's `__setattr__` would look for cells in the value.
        before = None if mode else (self.phase, [(cell, cell.training) for _, cell in self.cells_and_names()])
        object.__setattr__(self, "_mode_before", before)
        return super().set_train(mode)

    def set_grad(self, requires_grad: bool = True) -> nn.Cell:
        owner = type(self).__name__
        if requires_grad:
            raise ValueError(
                f"For '{owner}', which trains by itself, there is no gradient to take, but it was passed to another "
                f"training cell, or to Model together with an optimizer. Each step would be made twice. Pass "
                f"Model(cell) without an optimizer."
            )
        self._restore_mode()
        raise RuntimeError(
            f"For '{owner}', Model.predict would make a training step, since it calls the cell itself. Predict with "
            f"the network: Model(network).predict(x). To evaluate in between, pass Model(cell, eval_network=..., "
            f"eval_indexes=..., metrics=...)."
        )

    def _restore_mode(self):
        if self._mode_before is not None:
            phase, training = self._mode_before
            self.phase = phase
            for cell, mode in training:
                cell.add_flags(training=mode)
            object.__setattr__(self, "_mode_before", None)
