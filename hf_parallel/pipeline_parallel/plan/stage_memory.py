"""Compares the memory that the stages of a cut need with the memory that each rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from torch import Tensor, nn

from hf_parallel.model.stack import blocks_of
from hf_parallel.pipeline_parallel.schedule.actions import Schedule, placement_of
from hf_parallel.pipeline_parallel.schedule.simulate import peak_held, peak_live
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, Span, spans_of


@dataclass(frozen=True)
class StageMemory:
    """Bytes by part, and what each rank may hold.

    Args:
        parts: of each block, then of the tail: number of a tensor -> bytes kept for it all the time. A tensor that several
            parts name counts once on a rank.
        saved: bytes of activations of one microbatch that each block keeps for the backward, what comes before the first
            block counted with it, then those of the tail.
        limits: bytes that each pipeline rank may hold.
        schedule: actions of a training step: which rank has which stages, and how many microbatches are live.
    """

    parts: tuple[Mapping[int, float], ...]
    saved: tuple[float, ...]
    limits: tuple[float, ...]
    schedule: Schedule
    _kept: dict[Span, Mapping[int, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_ranks(self, bounds: Sequence[int]) -> list[float]:
        """Bytes that each rank holds at most under a cut."""
        tensors: list[dict[int, float]] = [{} for _ in self.schedule]
        for span, rank in zip(spans_of(bounds), placement_of(self.schedule), strict=True):
            tensors[rank].update(self._tensors(span))
        sums = [0.0, *accumulate(self.saved[:-1])]
        saved = [sums[hi] - sums[lo] for lo, hi in pairwise(bounds)]
        saved[-1] += self.saved[-1]
        return [sum(own.values()) + held for own, held in zip(tensors, peak_held(self.schedule, saved), strict=True)]

    def excess(self, bounds: Sequence[int]) -> float:
        """Share by which ranks exceed what they may hold, summed over them; 0 if the cut fits."""
        return sum(max(0.0, held / limit - 1) for held, limit in zip(self.of_ranks(bounds), self.limits, strict=True))

    def share(self, lo: int, hi: int, index: int) -> float:
        """Bytes that one stage needs over the bytes that its rank may hold; above 1 it does not fit."""
        placement = placement_of(self.schedule)
        span, rank = Span(lo, hi, index == len(placement) - 1), placement[index]
        own = {action.stage for action in self.schedule[rank]}
        saved = sum(self.saved[lo:hi]) + (self.saved[-1] if span.is_last else 0.0)
        live = peak_live(self.schedule)[rank] / len(own)
        return (sum(self._tensors(span).values()) + live * saved) / self.limits[rank]

    def refusal(self, bounds: Sequence[int]) -> str:
        """Word the refusal of a cut that does not fit, the best one that there is."""
        pairs = zip(self.of_ranks(bounds), self.limits, strict=True)
        needs = ", ".join(
            f"rank {rank} would hold {held / 1e9:.3g} of {limit / 1e9:.3g} GB"
            for rank, (held, limit) in enumerate(pairs)
        )
        sizes = [hi - lo for lo, hi in pairwise(bounds)]
        return (
            f"pipeline.rank_memory_gb={[float(f'{limit / 1e9:.3g}') for limit in self.limits]} is not enough for this model: "
            f"with stages of {sizes} blocks, the nearest cut, {needs} (weights, gradients, Adam's states, activations). Raise "
            "pipeline.rank_memory_gb, give smaller microbatches, or use more ranks (pp_size)."
        )

    def _tensors(self, span: Span) -> Mapping[int, float]:
        if span not in self._kept:
            parts = [*self.parts[span.lo : span.hi], *([self.parts[-1]] if span.is_last else [])]
            self._kept[span] = {number: size for part in parts for number, size in part.items()}
        return self._kept[span]


def memory_of(
    model: nn.Module,
    plan: PipelinePlan,
    schedule: Schedule,
    limits: Sequence[float],
    *,
    bytes_of: Callable[[str, Tensor], float],
) -> StageMemory:
    """Count the bytes of each part of a model: parameters with all that is kept for each, saved buffers, and activations.

    Activations are those of the plan's FLOPs: one row of typical length, or the sample that it was made with. Blocks that
    are recomputed count as if they were not.

    Args:
        model: the whole model.
        plan: from `discover_stages`.
        schedule: actions of a training step.
        limits: bytes that each pipeline rank may hold.
        bytes_of: what a rank keeps for a parameter or buffer, by its name.
    """
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    last = plan.num_blocks
    spans = [*(Span(j, j + 1, False) for j in range(last)), Span(last, last, True)]
    readers = [[(name, named[name]) for name in plan.readers(span) if name in named] for span in spans]
    for j, (block, own) in enumerate(zip(blocks_of(model, plan.stack), readers, strict=False)):
        prefix = f"{plan.stack}.{j}"
        saved_names = block.state_dict(keep_vars=True).keys()
        buffers = [(n, b) for n, b in block.named_buffers(remove_duplicate=False) if n in saved_names]
        tensors = [*block.named_parameters(remove_duplicate=False), *buffers]
        own += [(f"{prefix}.{name}", tensor) for name, tensor in tensors]
    parts = tuple({id(p): bytes_of(name, p) for name, p in own} for own in readers)
    scale = plan.num_tokens / plan.sample_tokens
    epochs = [(2 * j if j else 0, 2 * j + 2) for j in range(last)] + [(2 * last, 2 * last + 1)]
    saved = (sum(size for e, size in plan.saved.items() if begin <= e < end) for begin, end in epochs)
    return StageMemory(parts, tuple(scale * size for size in saved), tuple(limits), schedule)
