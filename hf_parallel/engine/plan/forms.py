"""The smaller models that stand for a whole one while it is planned, each made once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn

from hf_parallel.engine.plan.setup import Setup
from hf_parallel.errors import PlanError
from hf_parallel.model.fewer import Kept, may_need_fewer, with_blocks
from hf_parallel.model.narrow import Narrow, narrow_model
from hf_parallel.model.probes import Probes
from hf_parallel.model.stack import candidate_stacks
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan


class Forms:
    """The whole model, few of its blocks, and a narrow copy of these.

    With `self_check: full` there is the whole model alone.

    Args:
        setup: The whole model.
        probes: The batches to try it with.
        found: Its blocks and what passes between them; None: looked for when they are wanted.
    """

    def __init__(self, setup: Setup, probes: Probes, found: PipelinePlan | None) -> None:
        self.whole, self.sample = setup.model, probes.batch
        self._found, self._parts = found, setup.mesh.shape.tp_size
        self._tries = setup.config.pipeline.tries_fewer and setup.config.tensor_parallel.tries_fewer

    @cached_property
    def kept(self) -> Kept | None:
        """The blocks that show what all blocks do; None for all."""
        if not self._tries:
            return None
        if self._found is not None:
            return self._found.kept
        try:
            if not may_need_fewer(self.whole, candidate_stacks(self.whole)[0]):
                return None
            return discover_stages(self.whole, self.sample).kept
        except Exception:  # noqa: BLE001 - a model that cannot be cut, or that runs no such batch, is tried as it is
            return None

    @cached_property
    def few(self) -> nn.Module:
        """The model with these blocks."""
        return self.whole if self.kept is None else with_blocks(self.whole, self.kept.stack, self.kept.blocks)

    @cached_property
    def narrow(self) -> Narrow | None:
        """A narrow model that runs as `few` does; None where there is none."""
        if not self._tries:
            return None
        try:
            stack = candidate_stacks(self.whole)[0] if self.kept is None else self.kept.stack
        except PlanError:  # no list of blocks
            return None
        return narrow_model(self.few, stack, self.sample, parts=self._parts)

    def from_narrow(self) -> list[tuple[nn.Module, Mapping[str, Any]]]:
        """Every form with its batch, the narrowest first."""
        forms: list[tuple[nn.Module, Mapping[str, Any]]] = [(self.whole, self.sample)]
        if self.kept is not None:
            forms.insert(0, (self.few, self.sample))
        if self.narrow is not None:
            forms.insert(0, (self.narrow.model, self.narrow.batch(self.sample)))
        return forms
