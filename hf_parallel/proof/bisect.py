"""Where two runs part: the first module, microbatch and direction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_parallel.proof.compare import PERTURBED, REFERENCE, Comparison, Difference
from hf_parallel.proof.job import Job
from hf_parallel.proof.trace import TRACE


APART = 1e-4  # relative, of what passes through a module in fp32
MARGIN = 8.0  # times the spread of one process
ALIKE = 0.05  # relative differences of gradients that one wrong factor gives all of them are as near as this
FORWARD, OUTPUT_GRADIENT, INPUT_GRADIENT = "forward", "output_gradient", "input_gradient"


def first_divergence(job: Job, found: Comparison, traced: Path | None) -> dict[str, Any]:
    """The first place, in the order of execution, where a layout differs from one process.

    Args:
        job: The job.
        found: What differs.
        traced: Folder of the same job, traced for one step; None if it could not be.

    Returns:
        `module`; `microbatch`, None where it is not one of them; `kind`: forward, input gradient, weight gradient, reduction,
        clipping or optimizer.
    """
    beyond = [each for each in found.differences if each.excess > 1]
    begins = min((each.step for each in beyond), default=1)
    if begins == 1 and traced is not None:
        passed = first_apart(job, traced)
        if passed is not None:
            return passed
    gradients = [each for each in beyond if each.what == "gradient" and each.step == begins]
    if (found.missing and begins == 1) or (found.missing and not beyond):
        return _at(module_of(found.missing[0].split(" ")[0]), "weight gradient")
    if begins > 1 or (beyond and all(each.what in ("parameter", "learning_rate") for each in beyond)):
        worst = next((each for each in beyond if each.name), beyond[0])
        return _at(module_of(worst.name), "optimizer")
    if gradients:
        return _of_gradients(job, found, gradients)
    kind = "clipping" if any(each.what == "grad_norm" for each in beyond) else "forward"
    return _at("" if kind == "clipping" else "loss", kind)


def _of_gradients(job: Job, found: Comparison, beyond: list[Difference]) -> dict[str, Any]:
    """Gradients differ although what reached every module is right."""
    every = [each.relative for each in found.differences if each.what == "gradient" and each.step == beyond[0].step]
    if len(beyond) == len(every) > 1 and max(every) - min(every) <= ALIKE * max(every):
        return _at("", "clipping")
    shared = job.replicas > 1 or beyond[0].name in found.shared
    return _at(module_of(beyond[0].name), "reduction" if shared else "weight gradient")


def _at(module: str, kind: str, microbatch: int | None = None) -> dict[str, Any]:
    return {"module": module, "microbatch": microbatch, "kind": kind}


def module_of(parameter: str) -> str:
    """The module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


@dataclass(frozen=True)
class Event:
    """A place where what passed through a module differs.

    Args:
        order: When, in one process.
        module: Its name.
        microbatch: Of the batch, from 0.
        kind: forward, output_gradient or input_gradient.
    """

    order: int
    module: str
    microbatch: int
    kind: str


def first_apart(job: Job, folder: Path) -> dict[str, Any] | None:
    """The first module whose output, or whose gradient, differs in a traced step; None if all agree."""
    reference = Passages(folder / REFERENCE / TRACE)
    others = [Passages(folder / f"perturbed{number}" / TRACE) for number in range(1, PERTURBED + 1)]
    events = [
        event
        for rank in range(job.processes)
        for event in _events(job, reference, others, Passages(folder / f"rank{rank}" / TRACE))
    ]
    forward = [event for event in events if event.kind == FORWARD]
    if forward:
        first = min(forward, key=lambda event: event.order)
        return _at(first.module, "forward", first.microbatch)
    wrong = {(event.module, event.microbatch) for event in events if event.kind == OUTPUT_GRADIENT}
    passes = {module for module, kind, _ in reference.by_key if kind == OUTPUT_GRADIENT}  # not rotary tables
    inner = [
        e for e in events if e.kind == INPUT_GRADIENT and e.module in passes and (e.module, e.microbatch) not in wrong
    ]
    if not any(event.module in passes for event in events):
        return None
    first = min(
        inner or [e for e in events if e.module in passes], key=lambda event: (event.order, -len(event.module))
    )
    return _at(first.module, "input gradient", first.microbatch)


class Passages:
    """What one process noted of a step.

    Args:
        path: The file that it wrote.
    """

    def __init__(self, path: Path) -> None:
        noted = torch.load(path, weights_only=True)
        self.place: Mapping[str, Any] = noted["place"]
        self.passed: list[dict[str, Any]] = noted["passed"]
        self.by_key = {(each["module"], each["kind"], each["call"]): each for each in self.passed}

    @property
    def sharded_regions(self) -> tuple[set[str], set[str]]:
        """Modules with sharded parameters, and those of a block around them: inside, values are parts of sums."""
        modules = {module_of(name) for name in self.place["sharded"]}
        parents = {module_of(module) for module in modules}
        return modules, {p for p in parents if any(part.isdigit() for part in p.split("."))}

    def rows(self, job: Job) -> Iterator[tuple[dict[str, Any], int, int, int]]:
        """Each passage with its batch, its first row in the batch of this replica, and its microbatch."""
        places: dict[tuple[str, int], tuple[int, int, int]] = {}
        counts: dict[str, tuple[int, int]] = {}
        for each in self.passed:
            if each["kind"] == FORWARD:
                seen, number = counts.get(each["module"], (0, 0))
                batch, row = divmod(seen, job.rows)
                number = 0 if row == 0 else number
                places[each["module"], each["call"]] = batch, row, number
                counts[each["module"]] = seen + len(each["numbers"]), number + 1
        for each in self.passed:
            place = places.get((each["module"], each["call"]))
            if place is not None:
                yield (each, *place)


def _events(job: Job, reference: Passages, others: list[Passages], rank: Passages) -> Iterator[Event]:
    inside, regions = rank.sharded_regions if job.config.tp_size > 1 else (set(), set())
    factors: dict[
        int, float
    ] = {}  # of the gradients of a batch: replicas average, and factors may be applied at the end
    for each, batch, row, microbatch in rank.rows(job):
        module, kind = each["module"], each["kind"]
        key = module, kind, batch
        expected = reference.by_key.get(key)
        if expected is None or expected["shape"] != each["shape"] or module in inside:
            continue
        in_region = any(module == region or module.startswith(f"{region}.") for region in regions)
        if in_region and (kind != FORWARD or module not in regions):
            continue
        first = rank.place["dp"] * job.rows + row
        at = slice(first, first + len(each["numbers"]))
        wanted: Tensor = expected["numbers"][at]
        if wanted.shape != each["numbers"].shape:
            continue
        got: Tensor = each["numbers"]
        if kind != FORWARD:
            factor = factors.setdefault(batch, _factor(got, wanted))
            got = got / factor if factor else got
        scale = max(wanted.norm().item(), 1e-3 * expected["numbers"].norm().item()) or 1.0
        spreads = [
            (other.by_key[key]["numbers"][at] - wanted).norm().item() for other in others if key in other.by_key
        ]
        allowed = max(APART, MARGIN * max(spreads, default=0.0) / scale)
        apart = (got - wanted).norm().item() / scale
        if not apart <= allowed:
            yield Event(expected["order"], module, microbatch, kind)


def _factor(got: Tensor, wanted: Tensor) -> float:
    """By which number a tensor is a multiple of another."""
    square = wanted.square().sum().item()
    return (got * wanted).sum().item() / square if square else 1.0
