"""The inputs and output flags that a plan of stages is for: with others the model may take another path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_parallel.errors import PlanError
from hf_parallel.model.samples import output_flags, path_inputs


class CoveredInputs:
    """Sets of tensor inputs (those of the loss left out) with which a model takes the path of a plan.

    Args:
        model: The model.
        sample: Batch that the plan was made with.

    Attributes:
        covered: The sets.
        uncovered: Sets that were tried too, with the reason why they are not covered.
        flags: Output flags in effect when the plan was made.
        model_name: Class of the model.
    """

    def __init__(self, model: nn.Module, sample: Mapping[str, Any]) -> None:
        self.covered = frozenset({path_inputs(sample)})
        self.uncovered: dict[frozenset[str], str] = {}
        self.flags = output_flags(model, sample)
        self.model_name = type(model).__name__
        self._accepted: set[object] = set()

    def check(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Refuse a call whose inputs or output flags may take another path than the plan's.

        Covered are the sets of tensor inputs that were tried in discovery and every set between their intersection and
        their union. Inputs of the loss and inputs without tensors do not matter.

        Raises:
            PlanError: Names the inputs or the flag, and what to do.
        """
        names, flags = path_inputs(inputs), output_flags(model, inputs)
        if (names, flags) in self._accepted:
            return
        for (flag, planned), (_, now) in zip(self.flags, flags, strict=True):
            if planned != now:
                raise PlanError(
                    f"{flag} is {now!r} in this call and was {planned!r} when the stages of {self.model_name} were "
                    "planned: what crosses a cut depends on it. Set it in the config before the model is parallelized "
                    "and leave it."
                )
        always, possible = frozenset.intersection(*self.covered), frozenset.union(*self.covered)
        if not always <= names <= possible:
            raise PlanError(self._not_covered(names, always, possible))
        self._accepted.add((names, flags))

    def _not_covered(self, names: frozenset[str], always: frozenset[str], possible: frozenset[str]) -> str:
        extra, missing = sorted(names - possible), sorted(always - names)
        reasons = [f"{sorted(tried)}: {why}" for tried, why in self.uncovered.items() if tried & frozenset(extra)]
        return (
            f"{self.model_name} was planned for the inputs {sorted(always)}, with or without {sorted(possible - always)}"
            + (f"; {extra} in this batch may take another path through the model" if extra else "")
            + (f"; {missing} is missing in this batch" if missing else "")
            + (f" (tried: {'; '.join(reasons)})" if reasons else "")
            + ". Let the collator make the inputs that the model was planned for, or plan with a batch of this kind: "
            "HFParallelCallback(sample=collator([data[0], data[1]]))."
        )
