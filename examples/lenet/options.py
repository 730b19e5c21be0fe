"""Types of command-line options: what argparse says when a number is out of range."""

import argparse


def positive_int(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but got {value}")
    return value


def seed_int(text):
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**31 - 1, but got {value}")
    return value


def positive_float(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number > 0, but got {text}")
    return value


# What argparse calls them when the text is no number at all.
positive_int.__name__ = seed_int.__name__ = "integer"
positive_float.__name__ = "number"
