"""Bad values for accumulation, clipping and moving averages are refused at construction, by name."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from support.linear_pair import CELLS, Trained

NAN, INF = float("nan"), float("inf")


def raises(error, *words, kind="scaled", **keywords):
    """Asserts that the constructor raises `error`, and that the message has all the words."""
    with pytest.raises(error) as raised:
        Trained(kind, **keywords)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(
    "steps, error",
    [
        (0, ValueError),
        (-1, ValueError),
        (1.5, TypeError),
        (2.0, TypeError),
        (True, TypeError),
        ("2", TypeError),
        (None, TypeError),
        ([2], TypeError),
        (NAN, TypeError),
        (2**31, ValueError),
    ],
    ids=str,
)
def test_steps(kind, steps, error):
    raises(error, "'gradient_accumulation_steps'", str(steps), kind=kind, steps=steps)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
@pytest.mark.parametrize(
    "value, error",
    [
        (0, ValueError),
        (0.0, ValueError),
        (-1.0, ValueError),
        (-INF, ValueError),
        (NAN, ValueError),
        (True, TypeError),
        (np.bool_(True), TypeError),
        ("1.0", TypeError),
    ],
    ids=str,
)
def test_clips(kind, name, value, error):
    raises(error, f"'{name}'", str(value), kind=kind, **{name: value})


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(
    "decay, error",
    [
        (0, ValueError),
        (1, ValueError),
        (0.0, ValueError),
        (1.0, ValueError),
        (-0.1, ValueError),
        (1.1, ValueError),
        (NAN, ValueError),
        (INF, ValueError),
        ("0.9", TypeError),
    ],
    ids=str,
)
def test_decay(kind, decay, error):
    raises(error, "'ema_decay'", decay if isinstance(decay, str) else f"{decay:g}", kind=kind, ema_decay=decay)


@pytest.mark.parametrize("kind", CELLS)
def test_a_bool_is_no_decay(kind):
    raises(TypeError, "'ema_decay'", "True", kind=kind, ema_decay=True)


@pytest.mark.parametrize("kind", CELLS)
def test_both_clips(kind):
    raises(ValueError, "'clip_norm'", "'clip_value'", "1.0", "0.5", kind=kind, clip_norm=1.0, clip_value=0.5)


@pytest.mark.parametrize("kind", ["simultaneous", "alternating"])
@pytest.mark.parametrize(
    "clip_norm, clip_value",
    [(1.0, [None, 0.5]), ([1.0, None], 0.5), ([1.0, None], [0.5, None]), ([None, 1.0], [None, 0.5])],
)
def test_both_clips_for_one_of_the_networks(kind, clip_norm, clip_value):
    words = "'clip_norm' or by 'clip_value', but got both"
    raises(ValueError, words, kind=kind, clip_norm=clip_norm, clip_value=clip_value)


@pytest.mark.parametrize("kind", ["simultaneous", "alternating"])
def test_one_clip_for_each_network_is_fine(kind):
    Trained(kind, clip_norm=[None, 1.0], clip_value=[1.0, None])


@pytest.mark.parametrize("kind", ["simultaneous", "alternating"])
@pytest.mark.parametrize("name", ["clip_norm", "clip_value", "ema_decay"])
@pytest.mark.parametrize("values", [[], [0.5], [0.5, 0.5, 0.5], (0.5,)], ids=str)
def test_lists_of_a_wrong_length(kind, name, values):
    words = f"'{name}'", f"one entry for each of the 2 networks, but got {len(values)}"
    raises(ValueError, *words, kind=kind, **{name: values})


@pytest.mark.parametrize("kind", ["simultaneous", "alternating"])
@pytest.mark.parametrize("name", ["clip_norm", "clip_value", "ema_decay"])
@pytest.mark.parametrize(
    "bad, error", [(0, ValueError), (-1.0, ValueError), (NAN, ValueError), (True, TypeError), ("1", TypeError)]
)
def test_bad_entries_of_lists(kind, name, bad, error):
    for values in ([bad, 0.5], [None, bad]):
        raises(error, f"'{name}'", kind=kind, **{name: values})


@pytest.mark.parametrize("name", ["clip_norm", "clip_value", "ema_decay"])
def test_lists_for_one_network(name):
    raises(TypeError, f"'{name}'", **{name: [0.5]})


@pytest.mark.parametrize("kind", CELLS)
def test_what_is_right_is_taken(kind):
    # Python's and NumPy's numbers alike, and the extremes of the ranges.
    for keywords in (
        {"steps": np.int64(2), "clip_norm": np.float32(0.5), "ema_decay": np.float64(0.5)},
        {"steps": 1, "clip_norm": INF, "ema_decay": 1e-6},
        {"clip_value": 1, "ema_decay": 0.999999},
    ):
        Trained(kind, **keywords)


@quick_in_pynative_mode
def test_numpys_numbers_train_as_pythons(mode):
    trained = Trained("scaled", steps=np.int64(2), clip_norm=np.float32(0.5), ema_decay=np.float64(0.75))
    for seed in range(4):
        trained.call(seed)
