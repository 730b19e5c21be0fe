"""Attributes that can't be assigned once something was built from them."""

from typing import Any

from mindspore import nn


class FixedAttributes(nn.Cell):
    """Base class of cells that refuse to assign some attributes, where this would be ignored in silence."""

    _fixed: frozenset[str] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._fixed:
            super().__setattr__(name, value)
        # Assigning once more what is there changes nothing: a subclass may do that after `super().__init__(...)`.
        elif value is not getattr(self, name, self._fixed):
            raise AttributeError(
                f"For '{type(self).__name__}', '{name}' is fixed, since compiled code would not see a change. "
                f"{self._instead_of_assigning(name)}"
            )

    def fix(self, *names: str) -> None:
        """Makes attributes read-only, whether they exist or not."""
        self._fixed = self._fixed.union(names)

    def _instead_of_assigning(self, name):
        """Returns a sentence that says what to do instead."""
        raise NotImplementedError
