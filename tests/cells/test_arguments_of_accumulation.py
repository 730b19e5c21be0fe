"""Bad values for accumulation, clipping and moving averages are refused at construction, by name."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from support.linear_pair import CELLS, Trained

NAN, INF = float("nan"), float("inf")
SEVERAL = [kind for kind in CELLS if kind != "scaled"]
WRONG = {
    "steps": [(wrong, ValueError) for wrong in (0, -1, 2**31)]
    + [(wrong, TypeError) for wrong in (1.5, 2.0, True, "2", None, [2], NAN)],
    "clip_norm": [(wrong, ValueError) for wrong in (0, -1.0, -INF, NAN)]
    + [(wrong, TypeError) for wrong in (True, "1")],
    "ema_decay": [(wrong, ValueError) for wrong in (0, 1, -0.1, 1.1, NAN)]
    + [(wrong, TypeError) for wrong in (True, "0.9")],
}
WRONG["clip_value"] = [*WRONG["clip_norm"], (np.bool_(True), TypeError)]
OF_EACH = ("clip_norm", "clip_value", "ema_decay")


def raises(error, *words, kind="scaled", **keywords):
    """Asserts that the constructor raises `error`, and that the message has all the words."""
    with pytest.raises(error) as raised:
        Trained(kind, **keywords)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("name", WRONG)
def test_one_value(kind, name):
    shown = "gradient_accumulation_steps" if name == "steps" else name
    for wrong, error in WRONG[name]:
        raises(error, f"'{shown}'", f"{wrong:g}" if type(wrong) is float else str(wrong), kind=kind, **{name: wrong})


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("name", OF_EACH)
def test_one_value_for_each_network(kind, name):
    for wrong, error in WRONG[name]:
        for values in ([wrong, 0.5], [None, wrong]):
            raises(error, f"'{name}'", kind=kind, **{name: values})
    for values in ([], [0.5], [0.5, 0.5, 0.5], (0.5,)):
        words = f"'{name}'", f"one entry for each of the 2 networks, but got {len(values)}"
        raises(ValueError, *words, kind=kind, **{name: values})
    raises(TypeError, f"'{name}'", **{name: [0.5]})


@pytest.mark.parametrize("kind", CELLS)
def test_both_clips(kind):
    raises(ValueError, "'clip_norm'", "'clip_value'", "1.0", "0.5", kind=kind, clip_norm=1.0, clip_value=0.5)


@pytest.mark.parametrize("kind", SEVERAL)
def test_both_clips_for_one_of_the_networks(kind):
    words = "'clip_norm' or by 'clip_value', but got both"
    for clip_norm, clip_value in ((1.0, [None, 0.5]), ([1.0, None], 0.5), ([None, 1.0], [None, 0.5])):
        raises(ValueError, words, kind=kind, clip_norm=clip_norm, clip_value=clip_value)
    Trained(kind, clip_norm=[None, 1.0], clip_value=[1.0, None])


@quick_in_pynative_mode
def test_numpys_numbers_train_as_pythons(mode):
    trained = Trained("scaled", steps=np.int64(2), clip_norm=np.float32(0.5), ema_decay=np.float64(0.75))
    for seed in range(4):
        trained.call(seed)
