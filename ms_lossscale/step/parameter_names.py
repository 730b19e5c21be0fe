"""Names by which a checkpoint tells parameters apart."""


def network_prefix(i):
    """What the names of what network `i` has of its own begin with, where several may have it."""
    return f"network_{i}."


def add_prefix(prefix, parameters):
    """Puts the prefix before the parameters' names, once."""
    for parameter in parameters:
        if not parameter.name.startswith(prefix):
            parameter.name = prefix + parameter.name


def check_unique_names(owner, parameters):
    """Raises a ValueError if two parameters share a name: a checkpoint would silently keep one of them."""
    seen = {}
    for parameter in parameters:
        if seen.setdefault(parameter.name, parameter) is not parameter:
            raise ValueError(
                f"For '{owner}', every parameter must have a name of its own, since a checkpoint would silently keep "
                f"one of two, but two are named '{parameter.name}'. Rename the parameters of one network before its "
                f"optimizer is constructed: network.update_parameters_name('discriminator.'), say, or hold both "
                f"networks in one cell with auto_prefix=True."
            )
