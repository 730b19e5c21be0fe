"""Mutants of reference.py that do the same as the original, by the reason why."""

EQUIVALENT = {
    "The configurations always give it, only other tests use the default.": [
        "Run: forward_overflowed: bool = False: False → True",
        "Run: weight: float = 1.0: 1.0 → 2.0",
        "StepReference.__init__: 0 → 1",
        "StepReference.__init__: 1 → 2",
        "StepReference.__init__: True → False",
        "StepReference.__init__: True → False (2)",
        "StepReference.__init__: False → True (2)",
        "StepReference.__init__: self.shared, self.undoes_shared = (shared or Shared(), undoes_shared): "
        "shared or Shared() → shared",
    ],
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
        "StepReference._try: scales = self.scales * len(self.networks) if of_one else self.scales: "
        "self.scales * len(self.networks) if of_one else self.scales → self.scales * len(self.networks)",
        "StepReference._try: flags = [False] * len(self.rules): [False] * len(self.rules) → [False]",
    ],
    "All phases have the same.": [
        "AlternatingReference.__init__: self.phases, self.steps = (phases, phases[0].steps): 0 → 1",
        "AlternatingReference.call: self.shared_before = self.phases[0].shared.value: 0 → 1",
        "AlternatingReference._end_cycle: self.phases[0].shared.value = self.shared_before: 0 → 1",
    ],
    "It is returned, and not written any more.": [
        "StepReference.call: used = list(self.scales): list(self.scales) → self.scales",
    ],
    "The sums are 0.": ["NetworkReference.mean: total = sum(weights) or 1: 1 → 2"],
    "The ratio is 1.": [
        "NetworkReference.update: if self.clip_norm is not None and self.grad_norm > self.clip_norm:: "
        "self.grad_norm > self.clip_norm → self.grad_norm >= self.clip_norm",
    ],
    "It matters only where networks take turns, and steps have one.": [
        "StepReference.call: forward_overflowed = any((run.forward_overflowed for run in runs)): any → all",
    ],
    "A forward that overflowed is an overflow, wherever one is drawn.": [
        "StepReference.call: if overflow and forward_overflowed:: overflow and forward_overflowed → forward_overflowed",
    ],
    "Where no network takes part, nothing was written.": [
        "AlternatingReference._end_cycle: if skipped and (not applied):: skipped and (not applied) → not applied",
    ],
    "An overflow is either of a forward, or backs off.": [
        "StepReference._end_cycle: stands_still = self.rules[i].is_patient and self.forward_not_finite[i] and (not "
        "self.backs_off[i]): self.rules[i].is_patient and self.forward_not_finite[i] and (not self.backs_off[i]) → "
        "self.rules[i].is_patient and (not self.backs_off[i])",
    ],
}
