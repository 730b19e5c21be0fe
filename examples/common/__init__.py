"""What the examples share: the digits, LeNet-5, options, ranks, and what they write."""
