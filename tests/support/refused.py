"""Refused calls."""

import pytest


def refused(call, error, *words):  # Asserts that `call()` raises the error, and that its message has the words.
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in the message: {raised.value}"


def table(*rows):  # Parametrizes a test by rows of a call, an error, and words.
    return pytest.mark.parametrize("call, error, words", [(call, error, words) for call, error, *words in rows])
