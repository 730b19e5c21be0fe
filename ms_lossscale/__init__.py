"""Loss scaling for MindSpore: a training step as a transaction, for one or several networks."""

from ms_lossscale import emulation as emulation
from ms_lossscale.all_finite import all_finite as all_finite
from ms_lossscale.build_train_network import build_train_network as build_train_network
from ms_lossscale.callbacks.flush_accumulation import FlushAccumulation as FlushAccumulation
from ms_lossscale.callbacks.loss_scale_monitor import LossScaleMonitor as LossScaleMonitor
from ms_lossscale.cells.alternating_train_one_step_cell import (
    AlternatingTrainOneStepCell as AlternatingTrainOneStepCell,
)
from ms_lossscale.cells.scaled_train_one_step_cell import ScaledTrainOneStepCell as ScaledTrainOneStepCell
from ms_lossscale.cells.simultaneous_train_one_step_cell import (
    SimultaneousTrainOneStepCell as SimultaneousTrainOneStepCell,
)
from ms_lossscale.diagnosis import ActivationReport as ActivationReport
from ms_lossscale.diagnosis import GradientReport as GradientReport
from ms_lossscale.diagnosis import OverflowTrace as OverflowTrace
from ms_lossscale.diagnosis import locate_overflow as locate_overflow
from ms_lossscale.diagnosis import profile_activations as profile_activations
from ms_lossscale.diagnosis import profile_gradients as profile_gradients
from ms_lossscale.diagnosis import suggest_schedule as suggest_schedule
from ms_lossscale.loss_scale import DynamicLossScale as DynamicLossScale
from ms_lossscale.loss_scale import FixedLossScale as FixedLossScale
from ms_lossscale.loss_scale import ScheduledLossScale as ScheduledLossScale
from ms_lossscale.overflow_detector import FiniteGradients as FiniteGradients
from ms_lossscale.overflow_detector import FloatStatusRegister as FloatStatusRegister
from ms_lossscale.overflow_detector import OverflowDetector as OverflowDetector
