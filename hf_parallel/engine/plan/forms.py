"""The smaller models that stand for a whole one while it is planned, each made once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from torch import nn

from hf_parallel.errors import PlanError
from hf_parallel.model.fewer import Kept, may_need_fewer, with_blocks
from hf_parallel.model.narrow import Narrow, narrow_model
from hf_parallel.model.stack import candidate_stacks
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan


class Forms:
    """The whole model, few of its blocks, and a narrow copy of these.

    They hold parameters of the whole one: nobody keeps them when it is cut.

    Args:
        whole: The whole model.
        sample: Batch that it is tried with.
        found: Its blocks and what passes between them; None: looked for when they are wanted.
        parts: See `narrow_model`.
        tries_fewer: Whether there are others than the whole model.
    """

    def __init__(
        self,
        whole: nn.Module,
        sample: Mapping[str, Any],
        found: PipelinePlan | None = None,
        *,
        parts: int = 1,
        tries_fewer: bool = True,
    ) -> None:
        self.whole, self.sample = whole, sample
        self._found, self._parts, self._tries = found, parts, tries_fewer

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
            stack = candidate_stacks(self.whole, least=1)[0] if self.kept is None else self.kept.stack
        except PlanError:  # no list of blocks
            return None
        return narrow_model(self.few, stack, self.sample, parts=self._parts)

    def from_narrow(self) -> Iterator[tuple[nn.Module, Mapping[str, Any]]]:
        """Every form with its batch, the narrowest first."""
        if self.narrow is not None:
            yield self.narrow.model, self.narrow.batch(self.sample)
        if self.kept is not None:
            yield self.few, self.sample
        yield self.whole, self.sample
