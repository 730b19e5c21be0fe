"""Mutants of reference.py that do the same as the original, by the reason why."""

EQUIVALENT = {
    "The networks of the configurations have their own.": [
        "NetworkReference.after_update: return weights → pass",
        "NetworkReference.transform: return gradients → pass",
    ],
    "Only other tests call it.": ["DynamicRule.step: self.scale = self.next(self.scale, overflow) → pass"],
    "In float16, all overflows at scales far below.": [
        "DynamicRule.__init__: 2.0 → 3.0 (2)",
        "DynamicRule.__init__: 24 → 25",
    ],
    "Only as many are taken as there are networks, and where nothing is checked, it does not matter how many.": [
        "StepReference._try: scales = self.scales * len(self.networks) if of_one else self.scales: self.scales * "
        "len(self.networks) if of_one else self.scales → self.scales * len(self.networks)",
        "StepReference._try: flags = [False] * len(self.rules): [False] * len(self.rules) → [False]",
    ],
    "All phases have the same.": [
        "AlternatingReference.__init__: self.phases, self.steps = (phases, phases[0].steps): 0 → 1"
    ],
    "It is returned, and not written any more.": [
        "StepReference.call: used = list(self.scales): list(self.scales) → self.scales"
    ],
    "The sums are 0.": ["NetworkReference.mean: total = sum(weights) or 1: 1 → 2"],
    "The ratio is 1.": [
        "NetworkReference.update: if self.clip_norm is not None and self.grad_norm > self.clip_norm:: "
        "self.grad_norm > self.clip_norm → self.grad_norm >= self.clip_norm"
    ],
    "The values of a dict can be walked as often as a list.": [
        "StepReference.__init__: self.states = list({id(state): state for network in networks for state in "
        "network.states}.values()): list({id(state): state for network in networks for state in "
        "network.states}.values()) → {id(state): state for network in networks for state in "
        "network.states}.values()"
    ],
    "The loss of a network that does not take part is its last one.": [
        "AlternatingReference._end_cycle: if self.takes_part(i) and (not "
        "phase.counters['consecutive_skipped_steps']):: self.takes_part(i) and (not "
        "phase.counters['consecutive_skipped_steps']) → not phase.counters['consecutive_skipped_steps']"
    ],
}
