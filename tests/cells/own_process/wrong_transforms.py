"""Tests for a process of their own: gradient transforms that return something else than they should."""

import pytest
from mindspore import nn
from test_gradient_transforms import make, slopes


class Returns(nn.Cell):
    """Returns something else than it should."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def construct(self, grads):
        if self.what == "fewer":
            return grads[1:]
        if self.what == "number":
            return (1.0, *grads[1:])
        if self.what == "scalar":
            return (grads[0].sum(), *grads[1:])
        return grads[0] if self.what == "tensor" else None


@pytest.mark.parametrize(
    "what, error, returned",
    [
        ("fewer", ValueError, r"Returns returned 4 of \(3,\), \(3,\), \(3,\), \(3,\) for 5 of \(2, 3\), \(3,\)"),
        ("number", ValueError, r"Returns returned 5 of a number, \(3,\)"),
        ("scalar", ValueError, r"Returns returned 5 of \(\), \(3,\)"),
        ("tensor", TypeError, "Returns returned one Tensor"),
        ("nothing", TypeError, "Returns returned something else than a tuple"),
    ],
)
def test_what_they_return_is_checked(mode, what, error, returned):
    with pytest.raises(error, match=returned):
        make("scaled", [Returns(what)])(slopes())
