"""Keeps state in a global, which functions of other modules name."""

STATE = []
