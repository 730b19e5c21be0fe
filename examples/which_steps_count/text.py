"""Lines of English that every Python brings along, in batches: some short, some long, and some spoilt on purpose."""

from typing import NamedTuple

import numpy as np

LENGTH = 72
# The characters from which the next one is predicted.
CONTEXT = 8
LINES = 8
# What is not among the most frequent characters is one more character, the last one.
CHARACTERS = 96
# Of every so many steps, the first call of one is spoilt.
NAN_EVERY, SPIKE_EVERY = 10, 50
# What a spoilt line's factor is instead of 1.
SPIKE = 300.0


class Batch(NamedTuple):
    """For each place of padded lines: the CONTEXT characters before it, its own, and 1 if it is no padding, else 0."""

    contexts: np.ndarray
    characters: np.ndarray
    mask: np.ndarray


def read_lines():
    """Returns the lines of the language reference that Python's `help` shows."""
    from pydoc_data.topics import topics

    lines = (line.rstrip() for name in sorted(topics) for line in topics[name].splitlines())
    return [line[:LENGTH] for line in lines if line]


def make_batches(seed):
    """
    Returns batches of lines of about the same length, as one makes them so that little is padded, in random order:
    those to train on, and each tenth to test on.
    """
    lines = read_lines()
    text = "".join(lines)
    frequent = sorted(set(text), key=lambda character: (-text.count(character), character))[: CHARACTERS - 2]
    number = {character: i for i, character in enumerate(frequent, 1)}
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(lines))
    order = order[np.argsort([len(lines[i]) for i in order], kind="stable")]
    batches = []
    for i in range(0, len(order) - LINES + 1, LINES):
        characters = np.zeros((LINES, CONTEXT + LENGTH), np.int32)
        for row, its in zip(characters, order[i : i + LINES]):
            row[CONTEXT : CONTEXT + len(lines[its])] = [number.get(each, CHARACTERS - 1) for each in lines[its]]
        contexts = np.lib.stride_tricks.sliding_window_view(characters[:, :-1], CONTEXT, 1).reshape(-1, CONTEXT)
        predicted = characters[:, CONTEXT:].reshape(-1)
        batches.append(Batch(contexts, predicted, (predicted > 0).astype(np.float32)))
    batches = [batches[i] for i in rng.permutation(len(batches))]
    return [batch for i, batch in enumerate(batches) if i % 10], batches[::10]


def factor(step, call):
    """Returns by what the losses of a call are multiplied, as if by a weight of its lines: 1, unless it is spoilt."""
    if call == 0 and step % NAN_EVERY == 0:
        return np.nan
    return SPIKE if call == 0 and step % SPIKE_EVERY == SPIKE_EVERY // 2 else 1.0
