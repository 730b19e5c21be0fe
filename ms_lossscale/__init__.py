"""Loss scaling for MindSpore: a training step as a transaction, for one or several networks."""

from ms_lossscale.all_finite import all_finite as all_finite
from ms_lossscale.build_train_network import build_train_network as build_train_network
from ms_lossscale.loss_scale import DynamicLossScale as DynamicLossScale
from ms_lossscale.loss_scale import FixedLossScale as FixedLossScale
from ms_lossscale.loss_scale import ScheduledLossScale as ScheduledLossScale
from ms_lossscale.overflow_detector import FiniteGradients as FiniteGradients
from ms_lossscale.overflow_detector import FloatStatusRegister as FloatStatusRegister
from ms_lossscale.overflow_detector import OverflowDetector as OverflowDetector
from ms_lossscale.scaled_train_one_step_cell import ScaledTrainOneStepCell as ScaledTrainOneStepCell
