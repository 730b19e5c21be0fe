"""Why a run with dropout does not resume bit for bit: MindSpore itself does not repeat it."""

import mindspore
import numpy as np
from mindspore import Tensor, nn


def masks(calls=200):
    mindspore.set_seed(1)
    dropout, x = nn.Dropout(p=0.5).set_train(), Tensor(np.ones(1000, np.float32))
    return [dropout(x).asnumpy().tobytes() for _ in range(calls)]


def test_mindspore_does_not_repeat_what_dropout_draws(mode):
    # If it does, docs/step.md need not say that a resumed run draws anew.
    first = masks()
    assert masks()[0] == first[0]  # The seed is heeded,
    assert any(masks() != first for _ in range(50))  # but not for long, in one run or another.
