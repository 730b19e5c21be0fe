"""A package whose modules keep state that networks reach by its name."""
