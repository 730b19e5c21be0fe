"""Limits how much is looked at while a training cell is built."""


class OutOfBudget(Exception):
    """More would have to be looked at."""


class Budget:
    """So many looks are allowed."""

    def __init__(self, looks):
        self._left = looks

    def spend(self, looks):
        self._left -= looks
        if self._left < 0:
            raise OutOfBudget
