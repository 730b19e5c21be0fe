"""Loss scaling for MindSpore: a training step as a transaction, for one or several networks."""

from ms_lossscale import emulation
from ms_lossscale.all_finite import all_finite
from ms_lossscale.build_train_network import build_train_network
from ms_lossscale.callbacks.expose_optimizer import ExposeOptimizer
from ms_lossscale.callbacks.flush_accumulation import FlushAccumulation
from ms_lossscale.callbacks.loss_scale_monitor import LossScaleMonitor
from ms_lossscale.cells.alternating_train_one_step_cell import AlternatingTrainOneStepCell
from ms_lossscale.cells.manual_step import ManualStep
from ms_lossscale.cells.scaled_train_one_step_cell import ScaledTrainOneStepCell
from ms_lossscale.cells.simultaneous_train_one_step_cell import SimultaneousTrainOneStepCell
from ms_lossscale.diagnosis import (
    ActivationReport,
    Float32Advice,
    GradientReport,
    OverflowTrace,
    advise_float32,
    locate_overflow,
    profile_activations,
    profile_gradients,
    suggest_schedule,
)
from ms_lossscale.input_gradient import InputGradient
from ms_lossscale.loss_scale import DynamicLossScale, FixedLossScale, LossScale, ScheduledLossScale
from ms_lossscale.overflow_detector import FiniteGradients, FloatStatusRegister, OverflowDetector
from ms_lossscale.plot_scale import plot_scale
from ms_lossscale.sharding.merge_shards import merge_shards
from ms_lossscale.sharding.sharded_optimizer import ShardedOptimizer

__version__ = "0.4.0.dev0"

__all__ = [
    "ActivationReport",
    "AlternatingTrainOneStepCell",
    "DynamicLossScale",
    "ExposeOptimizer",
    "FiniteGradients",
    "FixedLossScale",
    "Float32Advice",
    "FloatStatusRegister",
    "FlushAccumulation",
    "GradientReport",
    "InputGradient",
    "LossScale",
    "LossScaleMonitor",
    "ManualStep",
    "OverflowDetector",
    "OverflowTrace",
    "ScaledTrainOneStepCell",
    "ScheduledLossScale",
    "ShardedOptimizer",
    "SimultaneousTrainOneStepCell",
    "advise_float32",
    "all_finite",
    "build_train_network",
    "emulation",
    "locate_overflow",
    "merge_shards",
    "plot_scale",
    "profile_activations",
    "profile_gradients",
    "suggest_schedule",
]
