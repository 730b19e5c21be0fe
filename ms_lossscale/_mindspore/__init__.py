"""Uses of MindSpore's private functions, and workarounds for its faults, each with its reason."""
