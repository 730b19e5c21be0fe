"""The modules that the examples share: the digits, LeNet-5, options, ranks, and output."""
