"""Two recorded runs, tensor by tensor, and how far apart rounding alone drives them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_parallel.proof.job import Job
from hf_parallel.proof.optimizer_settings import ALIKE, settings_apart
from hf_parallel.proof.record import GRADIENTS, LOGGED, PARAMETERS, RUN


REFERENCE = "reference"
PERTURBED = 2  # references with weights moved at rounding level
AGAIN = 6  # as many in all, where a difference is near what is allowed: two may be near each other by chance
NEAR = 4.0  # times what is allowed
EXACT = 1e-5  # relative, in fp32
MARGIN = 4.0  # times the spread of one process under perturbations at rounding level
# A tensor that is smaller than this share of the largest is compared at that scale: the true gradient of a key's bias is zero.
FLOOR = 1e-3


@dataclass(frozen=True)
class Difference:
    """Distance of a tensor, or a logged number, of one rank from the reference.

    Args:
        what: loss, grad_norm, learning_rate, gradient, parameter, or what the optimizer is set to, such as weight_decay.
        step: Optimizer step, from 1.
        name: Name of the parameter; empty for a number.
        rank: The rank that differs most.
        relative: The difference over the size of the reference.
        allowed: The most that `relative` may be.
    """

    what: str
    step: int
    name: str
    rank: int
    relative: float
    allowed: float

    @property
    def excess(self) -> float:
        """Factor by which the difference is above what is allowed; infinite for NaN."""
        return float("inf") if self.relative != self.relative else self.relative / self.allowed


@dataclass(frozen=True)
class Comparison:
    """All differences of a job, the largest excess first.

    Args:
        differences: One for each tensor and step, and for each number.
        missing: Gradients that one of the two runs lacks, `name (step n, rank r)`.
        shared: Parameters that several stages hold.
    """

    differences: list[Difference]
    missing: list[str]
    shared: frozenset[str] = frozenset()

    def dump(self, path: Path) -> None:
        """Write it for another process."""
        differences = [dataclasses.asdict(each) for each in self.differences]
        path.write_text(
            json.dumps({"differences": differences, "missing": self.missing, "shared": sorted(self.shared)})
        )

    @classmethod
    def load(cls, path: Path) -> Comparison:
        """The inverse of `dump`."""
        read = json.loads(path.read_text())
        return cls([Difference(**each) for each in read["differences"]], read["missing"], frozenset(read["shared"]))

    @property
    def is_near(self) -> bool:
        """Whether more perturbed references may show that rounding drives one process as far."""
        return not self.missing and self.differences[0].excess <= NEAR

    @property
    def ok(self) -> bool:
        """Whether everything is where it should be."""
        return not self.missing and all(each.excess <= 1 for each in self.differences)

    def largest(self, *what: str) -> float | None:
        """The largest relative difference of a kind; None if nothing of it was compared."""
        found = [each.relative for each in self.differences if each.what in what]
        return max(found, default=None, key=lambda value: float("inf") if value != value else value)


def perturbed_of(folder: Path) -> list[Path]:
    """Folders in which the perturbed references of a job have left their records."""
    return sorted(folder.glob("perturbed*"))


def compare(job: Job, folder: Path) -> Comparison:
    """Compare the runs that `start` left in a folder: all that was recorded before a rank of the layout failed, if one did."""
    ranks = [folder / f"rank{rank}" for rank in range(job.processes)]
    steps = [step for step in range(job.steps) if all((rank / f"{GRADIENTS}-{step}.json").exists() for rank in ranks)]
    has_ended = all((rank / RUN).exists() for rank in ranks)
    differences = list(_numbers(job, folder)) if has_ended else []
    for step in range(job.steps):
        found = settings_apart(step, folder / REFERENCE, ranks)
        differences += [Difference(each.key, step + 1, each.name, each.rank, each.relative, ALIKE) for each in found]
    missing: list[str] = []
    for step in steps:
        apart, absent = compare_tensors(job, folder, f"{GRADIENTS}-{step}", step + 1)
        differences += apart
        missing += absent
    if has_ended:
        apart, absent = compare_tensors(job, folder, PARAMETERS, job.steps)
        differences += apart
        missing += absent
    shared = json.loads((folder / "rank0" / RUN).read_text())["shared"] if has_ended else []
    return Comparison(sorted(differences, key=lambda each: -each.excess), missing, frozenset(shared))


def _numbers(job: Job, folder: Path) -> Iterator[Difference]:
    reference = _logged(folder / REFERENCE)
    others = [_logged(place) for place in perturbed_of(folder)]
    spreads = {key: max(_spreads(key, reference, others), default=0.0) for key in LOGGED}
    for rank in range(job.processes):
        logged = _logged(folder / f"rank{rank}")
        for step in range(job.steps):
            for key in LOGGED:
                expected, got = (
                    float(run[step].get(key, float("nan"))) if step < len(run) else float("nan")
                    for run in (reference, logged)
                )
                if expected != expected and got != got:
                    continue
                relative = abs(got - expected) / (abs(expected) or 1.0)
                yield Difference(key, step + 1, "", rank, relative, max(EXACT, MARGIN * spreads[key]))


def _spreads(key: str, reference: list[dict[str, Any]], others: list[list[dict[str, Any]]]) -> Iterator[float]:
    """Relative differences over all steps: two runs can be near each other in one number of one step by chance."""
    for step, logged in enumerate(reference):
        expected = float(logged.get(key, float("nan")))
        if expected == expected:
            for run in others:
                yield abs(float(run[step].get(key, expected)) - expected) / (abs(expected) or 1.0)


def _logged(folder: Path) -> list[dict[str, Any]]:
    logged: list[dict[str, Any]] = json.loads((folder / RUN).read_text())["logged"]
    return logged


class Recorded:
    """The tensors that one process recorded.

    Args:
        folder: Folder of the process.
        what: gradients-N, parameters or before.
    """

    def __init__(self, folder: Path, what: str) -> None:
        listed = json.loads((folder / f"{what}.json").read_text())
        self.absent = set(listed["absent"])
        self._pieces: dict[str, list[tuple[str, list[int]]]] = {}
        for key, (name, offsets) in listed["pieces"].items():
            self._pieces.setdefault(name, []).append((key, offsets))
        self._file = safe_open(folder / f"{what}.safetensors", framework="pt")

    @property
    def names(self) -> list[str]:
        """Names of the tensors that it has, or has parts of."""
        return list(self._pieces)

    def pieces(self, name: str) -> Iterator[tuple[list[int], Tensor]]:
        """Offsets in the whole tensor, and the elements, in fp64."""
        for key, offsets in self._pieces.get(name, ()):
            yield offsets, self._file.get_tensor(key).double()

    def whole(self, name: str) -> Tensor:
        """A tensor that it has all of."""
        return next(tensor for _, tensor in self.pieces(name))


def compare_tensors(job: Job, folder: Path, what: str, step: int) -> tuple[list[Difference], list[str]]:
    """Compare what all ranks recorded of one kind.

    Args:
        job: The job.
        folder: Folder of the job's runs.
        what: gradients-N, parameters or before.
        step: Step that it belongs to.

    Returns:
        A difference for each tensor, and what is missing on a side.
    """
    reference = Recorded(folder / REFERENCE, what)
    ranks = [Recorded(folder / f"rank{rank}", what) for rank in range(job.processes)]
    others = [Recorded(place, what) for place in perturbed_of(folder)]
    kind = "gradient" if what.startswith(GRADIENTS) else "parameter"
    whole = functools.lru_cache(maxsize=1)(reference.whole)
    largest = max((whole(name).norm().item() for name in reference.names), default=0.0)
    differences, missing = [], []
    for name in reference.names:
        expected = whole(name)
        scale = max(expected.norm().item(), FLOOR * largest) or 1.0
        spread = max((other.whole(name) - expected).norm().item() for other in others) / scale
        worst, worst_rank, seen = 0.0, 0, torch.zeros(expected.shape, dtype=torch.bool)
        for rank, recorded in enumerate(ranks):
            squares = 0.0
            for offsets, piece in recorded.pieces(name):
                at = tuple(slice(begin, begin + size) for begin, size in zip(offsets, piece.shape, strict=True))
                squares += (piece - expected[at]).square().sum().item()
                seen[at] = True
            relative = squares**0.5 / scale
            if not relative <= worst:
                worst, worst_rank = relative, rank
            if name in recorded.absent:
                missing.append(f"{name} (step {step}, rank {rank})")
        if not seen.all() and not any(entry.startswith(f"{name} (step {step},") for entry in missing):
            missing.append(f"{name} (step {step}: no rank has all of it)")
        differences.append(Difference(kind, step, name, worst_rank, worst, max(EXACT, MARGIN * spread)))
    extra = {name for recorded in ranks for name in recorded.names} - set(reference.names)
    missing += [f"{name} (step {step}: one process has none)" for name in sorted(extra)]
    return differences, missing
