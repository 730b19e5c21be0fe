"""Where and why values leave float16's range, and which loss scale to use."""

from ms_lossscale.diagnosis.activation_report import Activation as Activation
from ms_lossscale.diagnosis.activation_report import ActivationReport as ActivationReport
from ms_lossscale.diagnosis.advise_float32 import advise_float32 as advise_float32
from ms_lossscale.diagnosis.distribution import Distribution as Distribution
from ms_lossscale.diagnosis.distribution import Shares as Shares
from ms_lossscale.diagnosis.float32_advice import Float32Advice as Float32Advice
from ms_lossscale.diagnosis.float32_advice import NeedOfFloat32 as NeedOfFloat32
from ms_lossscale.diagnosis.float32_advice import Widening as Widening
from ms_lossscale.diagnosis.gradient_report import GradientReport as GradientReport
from ms_lossscale.diagnosis.gradient_report import Recommendation as Recommendation
from ms_lossscale.diagnosis.gradient_report import suggest_schedule as suggest_schedule
from ms_lossscale.diagnosis.locate_overflow import OverflowTrace as OverflowTrace
from ms_lossscale.diagnosis.locate_overflow import locate_overflow as locate_overflow
from ms_lossscale.diagnosis.profile_activations import profile_activations as profile_activations
from ms_lossscale.diagnosis.profile_gradients import profile_gradients as profile_gradients
