"""Finds the place where two runs part: the first module, microbatch and direction."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_parallel.proof.compare import REFERENCE, Comparison, Difference, compare_tensors, perturbed_of
from hf_parallel.proof.in_parts import merged
from hf_parallel.proof.job import Job
from hf_parallel.proof.record import BEFORE, GRADIENTS
from hf_parallel.proof.trace import TRACE


APART = 2e-5  # relative, of what passes through a module in fp32
MARGIN = 8.0  # times the spread of one process
ALIKE = 0.05  # relative differences of gradients that one wrong factor gives all of them are as near as this
FORWARD, OUTPUT_GRADIENT, INPUT_GRADIENT = "forward", "output_gradient", "input_gradient"


def first_step(found: Comparison) -> int:
    """The first optimizer step in which something differs, from 1; the one after all that agree if a run was stopped there."""
    steps = [each.step for each in found.differences if each.excess > 1]
    steps += [int(entry.rpartition("(step ")[2].split(",")[0].split(":")[0]) for entry in found.missing]
    return min(steps, default=1 + max((each.step for each in found.differences), default=0))


def first_divergence(job: Job, found: Comparison, traced: Path | None) -> dict[str, Any] | None:
    """The first place, in the order of execution, where a layout differs from one process.

    Args:
        job: The job, as it was traced: it ends with the first step that differs.
        found: Differences in the job itself.
        traced: Folder of the traced job; None if it could not be.

    Returns:
        `module`; `microbatch`, None where it is not one of them; `kind`: forward, input gradient, weight gradient, reduction,
        clipping or optimizer. None if a run was stopped before anything differed.
    """
    place = _in_traced_step(job, found, traced) if traced is not None else None
    if place is not None:
        return place
    beyond = [each for each in found.differences if each.excess > 1 and each.step == job.steps]
    gradients = [each for each in beyond if each.what == "gradient"]
    if found.missing and traced is None:
        return _at(module_of(found.missing[0].split(" ")[0]), "weight gradient")
    if gradients and traced is None:
        return _of_gradients(job, found.shared, gradients, [e for e in found.differences if e.what == "gradient"])
    if gradients or any(each.what == "grad_norm" for each in beyond):
        return _at("", "clipping")
    updates = [each for each in beyond if each.what != "loss"]
    if updates:
        settings = [each for each in updates if each.what != "parameter"]
        worst = next((each for each in settings if each.name), (settings or updates)[0])
        return _at(module_of(worst.name), "optimizer")
    return _at("loss", "forward") if beyond or found.missing else None


def _in_traced_step(job: Job, found: Comparison, traced: Path) -> dict[str, Any] | None:
    """Find where the traced step differs, before its gradients are clipped; None if nowhere."""
    ranks = [traced / f"rank{rank}" for rank in range(job.processes)]
    if all((rank / f"{BEFORE}.json").exists() for rank in ranks):
        weights = _beyond(compare_tensors(job, traced, BEFORE, job.steps)[0])
        if weights:  # those of the first step came with the model
            return _at(module_of(weights[0].name), "optimizer" if job.steps > 1 else "forward")
    if all((rank / TRACE).exists() for rank in ranks):
        passed = first_apart(job, traced)
        if passed is not None:
            return passed
    last = f"{GRADIENTS}-{job.steps - 1}"
    if not all((rank / f"{last}.json").exists() for rank in ranks):
        return None
    every, missing = compare_tensors(job, traced, last, job.steps)
    if missing:
        return _at(module_of(missing[0].split(" ")[0]), "weight gradient")
    gradients = _beyond(every)
    traces = [rank / TRACE for rank in ranks if (rank / TRACE).exists()]
    shared = found.shared.union(*(Passages(path).place["shared"] for path in traces))
    return _of_gradients(job, shared, gradients, every) if gradients else None


def _beyond(differences: list[Difference]) -> list[Difference]:
    """Differences that are too large, the largest excess first."""
    return sorted((each for each in differences if each.excess > 1), key=lambda each: -each.excess)


def _of_gradients(
    job: Job, several: frozenset[str], beyond: list[Difference], every: list[Difference]
) -> dict[str, Any]:
    """Gradients differ although what reached every module is right."""
    sizes, copies = [each.relative for each in every], job.replicas * job.config.sp_size
    if len(beyond) == len(every) > 1 and max(sizes) - min(sizes) <= ALIKE * max(sizes):
        return _at("", "reduction") if copies > 1 else _at("loss", "input gradient")
    is_reduced = copies > 1 or beyond[0].name in several
    return _at(module_of(beyond[0].name), "reduction" if is_reduced else "weight gradient")


def _at(module: str, kind: str, microbatch: int | None = None) -> dict[str, Any]:
    return {"module": module, "microbatch": microbatch, "kind": kind}


def module_of(parameter: str) -> str:
    """The module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


@dataclass(frozen=True)
class Event:
    """A tensor that passed through a module on a rank, compared with that of one process.

    Args:
        order: Position among what passed, in the order of one process.
        module: Name of the module.
        batch: Batch of the step, from 0.
        microbatch: Microbatch of the batch, from 0.
        kind: forward, output_gradient or input_gradient.
        agrees: Whether it is what passed in one process.
    """

    order: int
    module: str
    batch: int
    microbatch: int
    kind: str
    agrees: bool


@dataclass(frozen=True)
class Pair:
    """A tensor that passed through a module on a rank, with the one that should have.

    Args:
        event: The tensor's place and kind.
        replica: Replica that the rank belongs to.
        got: f64[rows, NUMBERS].
        wanted: f64[rows, NUMBERS].
        scale: Size that a difference is compared with.
        allowed: The most that the difference may be of it.
    """

    event: Event
    replica: int
    got: Tensor
    wanted: Tensor
    scale: float
    allowed: float

    def judged(self, factor: float) -> Event:
        """Whether it agrees, up to a factor of all gradients."""
        apart = (self.got / (factor or 1.0) - self.wanted).norm().item() / self.scale
        return dataclasses.replace(self.event, agrees=apart <= self.allowed)


def first_apart(job: Job, folder: Path) -> dict[str, Any] | None:
    """The first module whose output, or whose gradient, differs in a traced step; None if all agree."""
    reference = Passages(folder / REFERENCE / TRACE)
    others = [Passages(place / TRACE) for place in perturbed_of(folder)]
    pairs = [
        pair
        for rank in range(job.processes)
        for pair in _pairs(job, reference, others, Passages(folder / f"rank{rank}" / TRACE))
    ]
    forward = [event for pair in pairs if pair.event.kind == FORWARD if not (event := pair.judged(1.0)).agrees]
    if forward:
        first = min(forward, key=lambda event: event.order)
        return _at(first.module, "forward", first.microbatch)
    passes = {module for module, kind, *_ in reference.by_key if kind == OUTPUT_GRADIENT}  # not rotary tables
    backward = [pair for pair in pairs if pair.event.kind != FORWARD and pair.event.module in passes]
    factors = _factors(backward)
    events = [pair.judged(factors[pair.replica, pair.event.batch]) for pair in backward]
    return _first_backward([event for event in events if not event.agrees], events)


def _factors(pairs: list[Pair]) -> dict[tuple[int, int], float]:
    """Common factor of the gradients of each replica's batch.

    It is taken from the first that pass: replicas average, and factors may be applied at the end.
    """
    first: dict[tuple[int, int], list[Pair]] = {}
    for pair in pairs:
        known = first.setdefault((pair.replica, pair.event.batch), [])
        if known and pair.event.order < known[0].event.order:
            known.clear()
        if not known or pair.event.order == known[0].event.order:
            known.append(pair)
    return {
        key: statistics.median_low([_factor(pair.got, pair.wanted) for pair in known]) for key, known in first.items()
    }


def _first_backward(wrong: list[Event], every: list[Event]) -> dict[str, Any] | None:
    """The first module that turns a right gradient into a wrong one; the loss, if none was right before."""
    if not wrong:
        return None
    arrived = {(event.module, event.microbatch) for event in wrong if event.kind == OUTPUT_GRADIENT}
    inner = [e for e in wrong if e.kind == INPUT_GRADIENT and (e.module, e.microbatch) not in arrived]
    first = min(inner or wrong, key=lambda event: (event.order, -len(event.module)))
    begins = min(event.order for event in every if event.batch == first.batch)
    made_wrong = first.kind == OUTPUT_GRADIENT and first.order == begins
    return _at("loss" if made_wrong else first.module, "input gradient", first.microbatch)


class Passages:
    """The tensors that one process noted in a step.

    Args:
        path: The file that it wrote.
    """

    def __init__(self, path: Path) -> None:
        noted = torch.load(path, weights_only=True)
        self.place: Mapping[str, Any] = noted["place"]
        self.passed: list[dict[str, Any]] = merged(noted["passed"], self.place["parts"])
        self.by_key = {(each["module"], each["kind"], each["call"], each["part"]): each for each in self.passed}

    @property
    def sharded_regions(self) -> tuple[set[str], set[str]]:
        """Sharded modules of blocks, and those around them: inside, values are parts of sums. What an embedding leaves is whole."""
        modules = {module_of(name) for name in self.place["sharded"]}
        parents = {module_of(module) for module in modules}
        parts = {p for p in parents if any(part.isdigit() for part in p.split("."))}
        regions = {p for p in parts if not any(p.startswith(f"{other}.") for other in parts)}  # the outermost
        return {module for module in modules if module_of(module) in parts}, regions

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


def _pairs(job: Job, reference: Passages, others: list[Passages], rank: Passages) -> Iterator[Pair]:
    inside, regions = rank.sharded_regions if job.config.tp_size > 1 else (set(), set())
    calls = Counter(module for module, kind, _, part in reference.by_key if kind == FORWARD and part == 0)
    for each, batch, row, microbatch in rank.rows(job):
        module, kind = each["module"], each["kind"]
        key = module, kind, batch, rank.place["sp"]
        expected = reference.by_key.get(key)
        if expected is None or expected["shape"] != each["shape"] or module in inside:
            continue
        # A stage runs what is before its blocks on stand-ins, of which nothing has a gradient; tables of positions never have.
        answered = (module, OUTPUT_GRADIENT, batch, rank.place["sp"]) in reference.by_key
        if each["is_bare"] and answered and (module, OUTPUT_GRADIENT, each["call"], 0) not in rank.by_key:
            continue
        # What an expert gets is not rows of the batch, and neither is a module that is called several times a batch.
        if calls[module] != job.accumulation or len(expected["numbers"]) not in (1, job.rows * job.replicas):
            continue
        if module not in regions and any(module.startswith(f"{region}.") for region in regions):
            continue
        first = rank.place["dp"] * job.rows + row
        at = slice(first, first + len(each["numbers"]))
        wanted: Tensor = expected["numbers"][at]
        if wanted.shape != each["numbers"].shape:
            continue
        scale = max(wanted.norm().item(), 1e-3 * expected["numbers"].norm().item()) or 1.0
        spreads = [
            (other.by_key[key]["numbers"][at] - wanted).norm().item() for other in others if key in other.by_key
        ]
        allowed = max(APART, MARGIN * max(spreads, default=0.0) / scale)
        event = Event(expected["order"], module, batch, microbatch, kind, agrees=False)
        yield Pair(event, rank.place["dp"], each["numbers"], wanted, scale, allowed)


def _factor(got: Tensor, wanted: Tensor) -> float:
    """Number by which a tensor is a multiple of another."""
    square = wanted.square().sum().item()
    return (got * wanted).sum().item() / square if square else 1.0
