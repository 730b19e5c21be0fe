"""Keeps state in a global, which no other module mentions."""

STATE = []
