"""Names by which a checkpoint tells parameters apart."""


def check_unique_names(owner, cell):
    """Raises a ValueError if two parameters of the cell share a name: a checkpoint would silently keep one of them."""
    owners = {}
    for path, parameter in cell.parameters_and_names():
        other = owners.setdefault(parameter.name, (path, parameter))
        if other[1] is not parameter:
            raise ValueError(
                f"For '{owner}', all parameters must have names of their own, since a checkpoint would keep only one "
                f"of them, but '{other[0]}' and '{path}' are both named '{parameter.name}'. Rename one, before the "
                f"optimizer is constructed: network.update_parameters_name('prefix.'), or auto_prefix=True in the "
                f"cell that holds it."
            )
