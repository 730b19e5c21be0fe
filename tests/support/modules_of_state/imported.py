"""Keeps state in a global, which only an import in a forward names."""

STATE = []
