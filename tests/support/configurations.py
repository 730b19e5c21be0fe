"""Random configurations of the training cells, drawn from everything that can be combined: a cell's arguments, and the
calls that it gets.

Numbers are powers of two wherever the contract leaves a choice, so that the scale rounds nothing."""

import dataclasses
import itertools
import random
from typing import Optional

import numpy as np

from ms_lossscale import DynamicLossScale, NormSpike, ScheduledLossScale
from support.optimizers import RUN_EVERYWHERE
from support.reference import DynamicRule, FixedRule, HighLossRule, ScheduledRule, SpikeRule

# A ManualStep is called eagerly, or in a function that `mindspore.jit` compiles.
MANUAL = ("manual", "compiled")
CELLS = ("scaled", "simultaneous", "tuple", "alternating", *MANUAL)
CALLS = 12
NAN, INF = float("nan"), float("inf")

# Each loss scale: the cell's argument, and its update rule.
RULES = {
    "plain": (lambda: DynamicLossScale(2.0**13, scale_window=3), lambda: DynamicRule(2.0**13, 3)),
    "hysteresis": (
        lambda: DynamicLossScale(2.0**15, scale_window=2, hysteresis=2, min_loss_scale=2.0**10),
        lambda: DynamicRule(2.0**15, 2, hysteresis=2, low=2.0**10),
    ),
    "steep": (
        lambda: DynamicLossScale(2.0**12, 4.0, 2, backoff_factor=2.0**-3, hysteresis=1, max_loss_scale=2.0**15),
        lambda: DynamicRule(2.0**12, 2, factor=4.0, backoff=2.0**-3, high=2.0**15),
    ),
    "patient": (
        lambda: DynamicLossScale(2.0**14, scale_window=2, backoff_if_loss_not_finite=False),
        lambda: DynamicRule(2.0**14, 2, is_patient=True),
    ),
    "far above": (
        lambda: DynamicLossScale(2.0**40, max_loss_scale=2.0**40),
        lambda: DynamicRule(2.0**40, 2000, high=2.0**40),
    ),
    "fixed": (lambda: 2.0**11, lambda: FixedRule(2.0**11)),
    "scheduled": (
        lambda: ScheduledLossScale([1, 3, 4], [2.0**8, 2.0**13, 2.0**10]),
        lambda: ScheduledRule([1, 3, 4], [2.0**8, 2.0**13, 2.0**10]),
    ),
    "none": (lambda: None, lambda: FixedRule(1.0)),
    "unchecked": (
        lambda: ScheduledLossScale([1, 3], [2.0**8, 2.0**4], drop_overflow_update=False),
        lambda: ScheduledRule([1, 3], [2.0**8, 2.0**4]),
    ),
}
DYNAMIC, STATIC, UNCHECKED = ("plain", "hysteresis", "steep", "patient"), ("fixed", "scheduled"), ("none", "unchecked")

CLIPS = {
    **{"no_clip": {}, "norm": {"clip_norm": 0.5}, "value": {"clip_value": 0.5}, "measured": {"clip_norm": INF}},
    "mixed": {"clip_norm": (INF, None, 0.5), "clip_value": (None, 0.5, None)},
}
DECAYS = {"no_ema": None, "ema": 0.75, "some_ema": (None, 0.5, 0.875)}
# Which networks have weights, and aux.
WEIGHTS = {"no weights": False, "weights": True, "some weights": (True, False, True)}
AUX = {"no aux": False, "aux": True, "some aux": (False, True, True)}
# Inputs that make a weight NaN, negative and infinite.
BAD_WEIGHTS = {-5.0: NAN, -3.0: -1.0, 3.0: INF}
# Cells and state of the user's own. Gradients beyond the bound overflow for the own detector.
OWN = ("gradient_transforms", "after_update", "overflow_detector", "forward_state")
GRADIENT_BOUND = 2.0**7
# Each condition: the cell's argument, and its rule. The own one belongs to `configured_training.py`.
LOSS_BOUND, LOSS_GROWTH = 6.0, 0.25
CONDITIONS = {
    "spike": (lambda: NormSpike(max_norm=16.0, z_score=4.0, window=3), lambda: SpikeRule(16.0, 4.0, 3)),
    "high loss": (None, lambda: HighLossRule(LOSS_BOUND, LOSS_GROWTH)),
}
# Optimizers that compile fast.
FEW_OPTIMIZERS = ("nn.Momentum", "nn.AdamWeightDecay", "nn.SGD")
ALL_OPTIMIZERS = tuple(sorted(RUN_EVERYWHERE))
RESUMES = ("load_param_into_net", "load_state_dict", "copies")

# A gradient of 2**16 / scale overflows in float16. 2**15 does so at almost any scale, 2**-20 at none.
ORDINARY = (0.5, -1.0, 2.0)
SLOPES = (*ORDINARY, *ORDINARY, 4.0, 16.0, -32.0, 2.0**10, 2.0**15, INF, NAN)


@dataclasses.dataclass
class Call:
    """One call of a cell, and what is done before it.

    Attributes:
        slopes (list[float]): The approximate gradients of each network.
        forward_overflows_in (int): The network whose forward writes something that is not finite, or None.
        action (tuple): The name of a method to call before, and its argument if it has one; empty for none.
        is_within (bool): Whether it is called between the beginning and the end of a ManualStep instead.
        bad_weight (tuple): The network whose loss has an impossible weight, and an input that tells which; or None.
        raises_in (int): The network whose forward raises in it, before it is made again; or None."""

    slopes: list
    forward_overflows_in: Optional[int]
    action: tuple
    is_within: bool = False
    bad_weight: Optional[tuple] = None
    raises_in: Optional[int] = None

    @property
    def action_before(self):
        return () if self.is_within else self.action


@dataclasses.dataclass
class Configuration:
    """What a cell is made with, as far as `keywords` do not say it, some of OWN and a condition among it, and its
    calls."""

    cell: str
    count: int
    rules: list
    optimizers: list
    keywords: dict
    own: tuple
    calls: list
    resume: Optional[str]
    resume_at: int
    condition: Optional[str] = None

    @property
    def steps(self):
        return self.keywords["gradient_accumulation_steps"]

    @property
    def has_own_scales(self):
        return len(self.rules) > 1

    @property
    def checks(self):
        return self.rules[0] not in UNCHECKED

    @property
    def is_exact(self):
        """Whether float32 rounds only as the reference does: there is no norm, no division by 3, and none by the sum of
        several weights."""
        norms = self.keywords.get("clip_norm")
        norms = norms if isinstance(norms, list) else [norms]
        is_divided = self.steps == 3 or (self.steps == 2 and self.is_weighted)
        return not is_divided and not any(norm is not None and norm < INF for norm in norms)

    @property
    def is_watched(self):
        """Whether a monitor looks on, and the names of gradients are compared. What becomes of them with impossible
        weights, and of a monitor where a call raises, is not promised."""
        return all(call.bad_weight is None and call.raises_in is None for call in self.calls)

    @property
    def is_manual(self):
        return self.cell in MANUAL

    @property
    def prefix(self):
        """What the names of a ManualStep's own Parameters begin with."""
        name = self.keywords.get("name")
        return "" if name is None else f"{name}."

    @property
    def is_weighted(self):
        return bool(self.keywords.get("weighted"))

    def time(self):  # About how long it takes: resuming compiles everything twice, and retries make it larger.
        networks = {"scaled": 1, "alternating": 2}.get(self.cell, 1.5)
        return 1 + networks * (1 + (self.resume is not None)) * (1 + 0.5 * (self.keywords["max_retries"] > 0))

    def settings(self):  # The settings that distinguish it from others, by name.
        actions = self._actions()
        return {
            "cell": self.cell,
            "update rule": next(i for i, group in enumerate((DYNAMIC, STATIC, UNCHECKED)) if self.rules[0] in group),
            "has_own_scales": self.has_own_scales,
            "accumulates": self.steps > 1,
            "retries": self.keywords["max_retries"] > 0,
            "clip": str([self.of_network(name, 0) for name in ("clip_norm", "clip_value")]),
            "clips_alike": not isinstance(self.keywords.get("clip_norm"), list),
            "ema": str(self.keywords["ema_decay"]),
            **{name: name in self.own for name in OWN},
            "aux": str(self.keywords.get("has_aux")),
            "inputs": str(self.keywords.get("network_inputs")),
            "weighted": str(self.keywords.get("weighted")),
            "condition": self.condition,
            "patient": "patient" in self.rules,
            "named": self.prefix != "",
            "every": "every" in self.keywords,
            "optimizer": self.optimizers[0],
            "is_resumed": self.resume is not None,
            "forward_overflows": any(call.forward_overflows_in is not None for call in self.calls),
            "flush in a cycle": "flush in a cycle" in actions,
            "set_loss_scale": "set_loss_scale" in actions,
            "set_loss_scale in a cycle": "set_loss_scale in a cycle" in actions,
            "set_every in a cycle": "set_every in a cycle" in actions,
            "set_loss_scale in a call": any(call.is_within for call in self.calls),
            "drops calls": str(self.keywords.get("drop_overflowed_calls")),
            "discard in a cycle": "discard in a cycle" in actions,
            "bad weight": next((call.bad_weight[1] for call in self.calls if call.bad_weight is not None), None),
        }

    def _actions(self):  # Its actions, and which of them happen within a cycle.
        actions, calls = set(), 0
        for call in self.calls:
            name = call.action[0] if call.action else None
            actions.add(f"{name} in a cycle" if calls else name)
            calls = 0 if name in ("flush", "discard") else calls
            calls = (calls + 1) % self.steps
        return actions

    def of_network(self, name, i):  # The setting of network i.
        value = self.keywords.get(name)
        return value[i] if isinstance(value, list) else value

    def positions(self, i):  # The positions of the inputs that network i computes with.
        return self.of_network("network_inputs", i) or (2 * i, 2 * i + 1)


def draw(choose, optimizers=ALL_OPTIMIZERS, counts=(2, 3), cells=CELLS):
    """Draws one configuration.

    Args:
        choose (callable): Chooses one item of a sequence, at random or as hypothesis does.
        optimizers (tuple[str]): The names to choose from.
        counts (tuple[int]): The numbers of networks to choose from if there are several.
        cells (Sequence[str]): The names to choose from."""
    cell = choose(cells)
    is_manual = cell in MANUAL
    count = 1 if cell == "scaled" else choose((1, *counts) if is_manual else counts)
    clip, ema, retries = choose(tuple(CLIPS)), choose(tuple(DECAYS)), 0 if is_manual else choose((0, 1, 2))
    rules = _draw_rules(choose, cell, count, retries)
    steps = choose((1, 2, 3))
    keywords = {"gradient_accumulation_steps": steps, "max_retries": retries}
    keywords.update({name: _for(count, value) for name, value in CLIPS[clip].items()})
    keywords["ema_decay"] = _for(count, DECAYS[ema])
    if cell != "tuple":
        # All backwards of a ManualStep share one weight.
        weights = WEIGHTS[choose(("no weights", *WEIGHTS))]
        keywords["weighted"] = bool(weights) if is_manual else _for(count, weights)
    if cell == "alternating" and choose((False, True)):
        keywords["every"] = [choose((1, 2, 3)) for _ in range(count)]
    elif not is_manual:
        # A network with aux takes part in each call.
        aux = AUX[choose(("no aux", *AUX))]
        keywords["has_aux"] = bool(aux) if cell == "tuple" else _for(count, aux)
    if is_manual:
        keywords["name"] = choose((None, "step"))
    if count > 1 and cell != "tuple":
        first, own = ([(i * k, 2 * i + 1) for i in range(count)] for k in (0, 2))
        keywords["network_inputs"] = first if is_manual and keywords["weighted"] else choose((None, first, own))
    resume = choose((None, *RESUMES))
    its_optimizers = [choose(optimizers) for _ in range(count)]
    own = tuple(name for name in OWN if choose((False, False, True)))
    resume_at, condition = choose(range(2, CALLS - 2)) if resume else CALLS, choose((None, *CONDITIONS))
    its = cell, count, rules, its_optimizers, keywords, own, [], resume, resume_at, condition
    configuration = Configuration(*its)
    configuration.calls = [_draw_call(choose, configuration, i == CALLS - 1) for i in range(CALLS)]
    if steps > 1 and configuration.checks:
        keywords["drop_overflowed_calls"] = choose((False, True))
    return configuration


def _for(count, value):  # A setting for each network. A tuple has an entry for each; a single network takes the first.
    if not isinstance(value, tuple):
        return value
    return value[0] if count == 1 else list(value[:count])


def _draw_rules(choose, cell, count, retries):
    """Draws one name, or one for each network. All must agree on checks, and back off if there are retries."""
    group = DYNAMIC if retries else choose((DYNAMIC, DYNAMIC, DYNAMIC + STATIC, UNCHECKED))
    own = count > 1 and choose((False, True))
    return [choose(group) for _ in range(count)] if own else [choose(group)]


def _draw_call(choose, configuration, is_last):
    count = configuration.count
    actions = [()] * 8 + [("set_loss_scale",), ("flush",), ("discard",)]
    if "every" in configuration.keywords:
        actions += [("set_every",)] * 3
    action = choose(actions)
    if action == ("set_loss_scale",):
        # Also the initial scale: setting it within a cycle must keep it, even if it was the same before.
        scales = (
            *(2.0**exponent for exponent in (4, 9, 14)),
            *(RULES[name][1]().scale for name in configuration.rules),
        )
        values = [choose(scales) for _ in range(count)]
        one = not configuration.has_own_scales and configuration.cell != "alternating"
        action += (values[0] if one else values,)
    elif action == ("set_every",):
        action += ([choose((1, 2, 3)) for _ in range(count)],)
    is_within = configuration.cell == "manual" and action[:1] == ("set_loss_scale",) and choose((False, True))
    if not configuration.checks and (not is_last or "clip_value" in configuration.keywords):
        # An overflow would ruin all weights, and what becomes of a NaN that is clipped is not promised.
        return Call([choose(ORDINARY) for _ in range(count)], None, action, is_within)
    # In most calls, at most one network overflows.
    slopes = [choose(ORDINARY) for _ in range(count)]
    for _ in range(choose((1, 1, count))):
        slopes[choose(range(count))] = choose(SLOPES)
    # Not with own scales in a cycle: there, each call tells by itself whose overflow it was.
    may_overflow = not (configuration.has_own_scales and configuration.steps > 1)
    overflows_in = choose(range(count)) if may_overflow and choose((False,) * 9 + (True,)) else None
    bad_weight = 0 if configuration.is_manual else choose(range(count)), choose((None,) * 21 + tuple(BAD_WEIGHTS))
    has_bad = configuration.checks and configuration.of_network("weighted", bad_weight[0]) and None not in bad_weight
    return Call(slopes, overflows_in, action, is_within, bad_weight if has_bad else None)


def inputs(configuration, index):  # The arrays of a call: for each network a batch and a slope, exact in float16.
    call = configuration.calls[index]
    rng = np.random.default_rng(index)
    values = []
    for i, slope in enumerate(call.slopes):
        x = (rng.integers(-16, 17, (2, 2)) / 8).astype(np.float32)
        if i == call.forward_overflows_in:
            x[1, 0] = np.inf
        if call.bad_weight is not None and i == call.bad_weight[0]:
            x[0, 0] = call.bad_weight[1]
        values += [x, np.float32(slope)]
    return values


def of_seed(seed):  # A mode and a configuration.
    choose = random.Random(seed).choice
    return choose(("graph", "pynative")), draw(choose, FEW_OPTIMIZERS, (2,))


def covering(pool=500):
    """Returns few configurations and modes that cover all pairs of values of different settings that occur in a large
    pool, and each loss scale, number of calls and attempts, and way to resume. Those that cover most in their time come
    first."""
    candidates = []
    for seed in range(pool):
        mode, drawn = of_seed(seed)
        covers = set(itertools.combinations({"mode": mode, **drawn.settings()}.items(), 2))
        covers.update(drawn.rules, [("steps", drawn.steps), ("retries", drawn.keywords["max_retries"]), drawn.resume])
        candidates.append((covers, mode, drawn))
    missing = set().union(*(covers for covers, _, _ in candidates))
    while missing:
        covers, mode, drawn = max(candidates, key=lambda each: len(each[0] & missing) / each[2].time())
        missing -= covers
        yield mode, drawn


def planted():  # Yields modes and configurations of what chance would hardly draw.
    scales = {"v": [2.0**10, 2.0**10], "w": [2.0**10, 2.0**4]}
    # The first scale at its floor, so that nothing is tried again; then finite gradients, but the own detector says no.
    yield _plant("simultaneous", "vLL .. w.L ..", ["hysteresis", "plain"], ["overflow_detector"], scales, max_retries=1)
    # A spike right after the window of the mean, and the ceiling.
    yield _plant("scaled", ". . . M . . .", ["steep"], condition="spike")
    # A list of one network.
    yield _plant("list of one", ". . L N . . .", clip_norm=INF, ema_decay=0.75)
    # Each try that failed counts for the update rule.
    yield _plant("scaled", ". . . . . . . . . .", ["far above"], max_retries=2)
    # Whose forward was not finite.
    for cell in ("simultaneous", "compiled"):
        yield _plant(cell, "N. .N F. .F NN LL LN GN GL G. ..", ["patient", "patient"])
    # When networks take turns, the loss of one that was skipped does not count, nor that of an earlier call of a cycle.
    yield _plant("alternating", ".. .N ..", every=[1, 2])
    calls = ".. .. .. .N .. .. .. |.. .. .N |.. .. .. .. .."
    # One ends by a flush right after it was resumed.
    yield _plant("alternating", calls, every=[1, 2], gradient_accumulation_steps=2, resume_at=7)
    # Calls are dropped: the first, the last, all, and by a flush or before one; and by a discard.
    dropping = {"gradient_accumulation_steps": 3, "drop_overflowed_calls": True}
    calls = ". N . . . L N L N . N |. N |. N !L . . N N !. . . N |."
    yield _plant("scaled", calls, ["steep"], condition="spike", ema_decay=0.75, clip_norm=INF, **dropping)
    # Whose forward was not finite, and whose gradients overflowed, in the same cycle or another one.
    calls = "N. .. .. N. L. .. N. .L .. NN NN NN .N N. .. .. .. .. LL .. .."
    yield _plant("simultaneous", calls, ["patient", "patient"], condition="high loss", **dropping)
    # State that both reach, where cycles of the first, the second, and both networks are skipped.
    yield _plant("alternating", ".. .N N. .. N. .N .N .. NN |..", gradient_accumulation_steps=2)


def raising():
    """Yields modes and configurations in which forwards raise before a call is made, also in one from which a second
    cell resumes, and where something overflows."""
    every_call = {"alternating": ".. 1.. .N 0.. 1L. .. 1.. N. ..", "scaled": ". 0. N 0. 0L . 0. N ."}
    for cell, calls in every_call.items():
        for keywords in (
            {"gradient_accumulation_steps": 2, "ema_decay": 0.5},
            {},
            {"gradient_accumulation_steps": 3, "drop_overflowed_calls": True},
            {"max_retries": 1, "clip_norm": INF},
        ):
            yield _plant(cell, calls, resume_at=4, **keywords)
    # Where networks take turns, and with aux.
    for keywords, way in (({"every": [3, 1]}, RESUMES[0]), ({"has_aux": [True, True]}, RESUMES[2])):
        keywords["gradient_accumulation_steps"] = 2
        yield _plant("alternating", ".. 1.. .N .. 1L. .. 1.. N. ..", resume_at=4, resume=way, **keywords)


_SLOPES = {".": 1.0, "M": 3.0, "L": 2.0**10, "N": NAN, "F": 1.0, "G": 2.0**10}


def _plant(
    cell, calls, rules=("plain",), own=(), scales=None, condition=None, resume_at=None, resume=RESUMES[1], **keywords
):
    """A configuration with a letter for each network in each call, F or G if the forward overflows, and before it an
    action: | flushes, ! discards, a number tells in which network it raises, and another sign sets scales."""
    count = 1 if cell in ("scaled", "list of one") else 2
    cell = "simultaneous" if cell == "list of one" else cell
    keywords = {"gradient_accumulation_steps": 1, "max_retries": 0, "ema_decay": None, **keywords}
    if count > 1:
        keywords["network_inputs"] = [(0, 1), (2, 3)]
    drawn = []
    for call in calls.split():
        action, letters = call[:-count], call[-count:]
        actions = {"": (), "|": ("flush",), "!": ("discard",), "0": (), "1": ()}
        raises_in = int(action) if action.isdigit() else None
        action = actions.get(action, ("set_loss_scale", (scales or {}).get(action)))
        overflows_in = next((i for i, letter in enumerate(letters) if letter in "FG"), None)
        drawn.append(Call([_SLOPES[letter] for letter in letters], overflows_in, action, raises_in=raises_in))
    resume = (None, len(drawn)) if resume_at is None else (resume, resume_at)
    settings = (cell, count, list(rules), ["nn.SGD"] * count, keywords, tuple(own), drawn, *resume, condition)
    return "pynative", Configuration(*settings)
