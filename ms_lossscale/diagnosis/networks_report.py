"""The report on the gradients of several networks, each of which has its own loss scale."""

from typing import Any

from ms_lossscale._output import written_scale
from ms_lossscale.diagnosis.gradient_report import GradientReport
from ms_lossscale.diagnosis.picture import Picture


class NetworksReport(GradientReport):
    """A :class:`GradientReport` of all `networks` together, which recommends a loss scale for each of them."""

    def _recommendation(self, headroom, dtype, of):
        return [each._recommendation(headroom, dtype, of) for each in self.networks]

    def _named(self):
        return [(f"networks[{i}]", each) for i, each in enumerate(self.networks)]

    def _why_not(self):
        return " ".join(f"{name}: {each._why_not()}" for name, each in self._named() if each._why_not())

    def _recommended_for(self):
        """Returns the names of the networks for which each loss scale is recommended."""
        names = {}
        for name, each in self._named():
            if not each._why_not():
                names.setdefault(each.recommended_loss_scale, []).append(name)
        return names

    def _shown_scales(self):
        return [1.0, *self._recommended_for()]

    def _warnings(self):
        return [f"{name}: {line}" for name, each in self._named() for line in each._warnings()]

    def __str__(self) -> str:
        head = (
            f"{self._title()}, computed at loss scale {self._scale()}; each network has its own loss scale, and a "
            f"report of its own."
        )
        return "\n\n".join([head, *(f"{name}: {each}" for name, each in self._named())])

    def _recommendation_as_dict(self):
        return [each._asdict() for each in self.recommend()]

    def _further_content(self) -> dict[str, Any]:
        return {**super()._further_content(), "networks": [each._content() for each in self.networks]}

    def _picture(self) -> Picture:
        scales = {"loss scale 1": 1.0}
        for scale, names in self._recommended_for().items():
            scales[f"loss scale {written_scale(scale)} (recommended for {' and '.join(names)})"] = scale
        title = f"{self._title()}, computed at loss scale {self._scale()}"
        return Picture(title, scales, "parameter, worst first", self._rows(), self._warnings())
