"""Which of an optimizer's state belongs to the elements of its shards, and which is the same on all ranks."""

from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from ms_lossscale._mindspore import unlisted_state


def find_states(owner, optimizer, shards):
    """
    Sorts the state of an optimizer, of which shards still have the names of their weights.

    State of the elements has its shard's shape, and its name ends with the weight's, as
    :meth:`mindspore.ParameterTuple.clone` makes it. Where all shards have one element, names alone tell.

    Returns two lists: pairs of a state of the elements of a shard and the name of its weight; and all other state.
    """
    lengths = {shard.name: shard.size for shard in shards}
    longest_first = sorted(lengths, key=len, reverse=True)
    known = {id(shard) for shard in shards}
    families, others = {}, []
    for state in (*optimizer.get_parameters(), *unlisted_state(optimizer)):
        if id(state) in known:
            continue
        known.add(id(state))
        weight = next((name for name in longest_first if state.name.endswith((f".{name}", f"_{name}"))), None)
        if weight is None:
            others.append(state)
        else:
            families.setdefault(state.name[: -len(weight)], []).append((state, weight))
    split = []
    for family in families.values():
        # `eta` and `mu` of ASGD are named after the weights, too, but are numbers.
        if all(tuple(state.shape) == (lengths[weight],) for state, weight in family):
            split += family
        else:
            others += [state for state, _ in family]
    _check_others(owner, optimizer, others)
    return split, others


def _check_others(owner, optimizer, others):
    schedules = [cell for _, cell in optimizer.cells_and_names() if isinstance(cell, LearningRateSchedule)]
    of_schedules = {id(parameter) for cell in schedules for parameter in cell.get_parameters()}
    for state in others:
        if state.layerwise_parallel or (state.size > 1 and id(state) not in of_schedules):
            raise ValueError(
                f"For '{owner}', state of the {type(optimizer).__name__} must be one number, or for each weight one "
                f"Parameter of its shape whose name ends with the weight's, but '{state.name}' has the shape "
                f"{tuple(state.shape)}. Make it with optimizer.parameters.clone(prefix=...), say."
            )
