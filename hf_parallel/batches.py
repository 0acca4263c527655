"""Splits batches into microbatches, counts labels, and compares the batches and random states of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_parallel.compat.private_collectives import rows_of_ranks
from hf_parallel.errors import ConfigError, RankMismatchError, UnsupportedError
from hf_parallel.mesh.groups import Mesh


IGNORED_LABEL = -100
# The row count is read from the first of these that the batch has.
ROW_INPUTS = ("input_ids", "inputs_embeds", "labels", "attention_mask")

_KNOWN_TO_NUMPY = frozenset((torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64))


def num_rows(batch: Mapping[str, Any]) -> int:
    """Number of sequences in a batch.

    Raises:
        ConfigError: The batch has none of the inputs that carry rows.
    """
    for name in ROW_INPUTS:
        if isinstance(batch.get(name), torch.Tensor):
            return int(batch[name].shape[0])
    raise ConfigError(
        f"cannot tell the rows of a batch with the inputs {sorted(batch)}: none of {', '.join(ROW_INPUTS)} is a "
        "tensor. Name the token ids input_ids."
    )


def split_rows(batch: Mapping[str, Any], num_microbatches: int) -> list[dict[str, Any]]:
    """Cut a batch along its rows into at most `num_microbatches` parts whose sizes differ by at most one.

    Tensors with one entry a row are cut: along dim 0, or dim 1 of position_ids with three dims (one for time, height and
    width each). Everything else (a broadcast position_ids of one row, flags) goes to every microbatch.

    Raises:
        UnsupportedError: Labels have another number of rows than the inputs (one row a codebook, for example), or features have
            (images, where rows have several or none).
    """
    rows = num_rows(batch)
    parts = min(num_microbatches, rows)
    if parts <= 1:
        return [dict(batch)]
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and (name == "labels" or _is_features(value)) and value.shape[0] != rows:
            raise UnsupportedError(
                f"num_microbatches={num_microbatches}: the inputs of this batch have {rows} rows and its {name} "
                f"{value.shape[0]}, so it cannot be cut along its rows. Set pipeline.num_microbatches to 1 and "
                "gradient_accumulation_steps to the number of microbatches."
            )
    sizes = [rows // parts + (index < rows % parts) for index in range(parts)]
    return [take_rows(batch, sum(sizes[:index]), size, rows) for index, size in enumerate(sizes)]


def take_rows(batch: Mapping[str, Any], first: int, count: int, rows: int) -> dict[str, Any]:
    """Some rows of a batch.

    Args:
        batch: Inputs by name.
        first: Index of the first row.
        count: Number of rows.
        rows: Rows of the batch: tensors that have as many are cut, as views, and what has not stays as it is.
    """
    taken = dict(batch)
    for name, value in batch.items():
        dim = _dim_of_rows(name, value, rows)
        if dim is not None:
            taken[name] = value.narrow(dim, first, count)
    return taken


def _is_features(value: torch.Tensor) -> bool:
    """Whether these are numbers that the model reads beside the tokens of all rows: more than a mask that rows share."""
    return value.is_floating_point() and value.ndim > 1 and value.shape[0] != 1


def _dim_of_rows(name: str, value: Any, rows: int) -> int | None:
    """The dim that has one entry a row; None without one."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return None
    dim = 1 if name == "position_ids" and value.ndim == 3 else 0
    return dim if value.shape[dim] == rows else None


def empty_microbatch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """One row of a batch with labels, none of which count: what it adds to a loss over tokens is zero."""
    first = take_rows(batch, 0, 1, num_rows(batch))
    return first | {
        name: torch.full_like(first[name], IGNORED_LABEL) for name in ("labels", "shift_labels") if name in first
    }


def count_targets(batch: Mapping[str, Any], shifted: bool) -> torch.Tensor:
    """Number of label positions (0-d int64) that the loss of this batch averages over.

    Args:
        batch: Needs `labels` i[B S], or `shift_labels` as padding-free collators provide.
        shifted: Whether the loss predicts token i+1 at position i, so that the first label is no target.
    """
    shift_labels: torch.Tensor | None = batch.get("shift_labels")
    if shift_labels is not None:
        return shift_labels.ne(IGNORED_LABEL).sum()
    labels: torch.Tensor = batch["labels"]
    return (labels[..., 1:] if shifted else labels).ne(IGNORED_LABEL).sum()


class BatchCheck:
    """Compares the batch across the ranks of one model copy on the first steps after each reset.

    Stages that read different batches train silently wrong; non-deterministic collators and streams cause it.
    """

    def __init__(self, mesh: Mesh, steps: int) -> None:
        self._mesh = mesh
        self._steps = steps
        self._left = steps

    def reset(self) -> None:
        """Check the next steps again (a new epoch may use a new sampler)."""
        self._left = self._steps

    def check(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Collective over the ranks of one model copy while steps to check remain.

        Raises:
            RankMismatchError: On every rank, naming those that differ.
        """
        group = self._mesh.mp_group
        if self._left <= 0 or group is None:
            return
        self._left -= 1
        device = next(v.device for b in batches for v in b.values() if isinstance(v, torch.Tensor))
        mine = torch.tensor([digest(batches)], dtype=torch.int64, device=device)
        refuse_unlike(self._mesh, rows_of_ranks(mine, group).flatten().tolist())


def refuse_unlike(mesh: Mesh, digests: Sequence[int]) -> None:
    """Refuse batches that differ over the ranks of one model copy.

    Args:
        mesh: This rank's mesh.
        digests: Digests of the batches of each rank of this copy, in rank order.

    Raises:
        RankMismatchError: Raised on every rank that compares; names the ranks that differ.
    """
    if len(set(digests)) == 1:
        return
    names = [mesh.shape.describe(rank) for rank in mesh.copy_ranks]
    odd = [name for name, value in zip(names, digests, strict=True) if value != digests[0]]
    raise RankMismatchError(
        f"{', '.join(odd)} read a different batch than {names[0]}, but all ranks of one "
        "model copy must read the same rows. A collator or dataset that draws random numbers must be seeded alike "
        "on all of them; an IterableDataset must yield the same stream on all of them; what is done to a batch in "
        "training_step or compute_loss must not depend on the rank."
    )


class RandomCheck:
    """Compares random states across tensor-parallel ranks around the first training forwards that draw numbers.

    The ranks hold the same activations outside of pairs, so their dropout masks must be the same there. Ranks that
    were seeded differently, or code that seeds itself, would train silently wrong.

    Args:
        mesh: This rank's mesh.
        device: Device of the model.
        steps: Forwards to check.
    """

    def __init__(self, mesh: Mesh, device: torch.device, steps: int) -> None:
        self._mesh, self._device, self._left = mesh, device, steps
        self._draws = False

    def word(self) -> int:
        """A number for the state in which a training forward that draws begins; 0 for one that does not draw."""
        return self._state() if self._draws else 0

    def refuse_unlike(self, words: Sequence[int]) -> None:
        """Compare what `word` gave on the tensor-parallel ranks.

        Raises:
            RankMismatchError: On every rank, naming those that differ.
        """
        if len(set(words)) > 1:
            self._refuse([(word, word) for word in words])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around one training forward; collective over the tensor-parallel ranks while forwards to check remain.

        Raises:
            RankMismatchError: On every rank, naming those that differ.
        """
        if self._left <= 0 or self._mesh.tp_group is None:
            yield
            return
        self._left -= 1
        before = self._state()
        yield
        after = self._state()
        mine = torch.tensor([before, after], dtype=torch.int64, device=self._device)
        states = [(one, other) for one, other in rows_of_ranks(mine, self._mesh.tp_group).tolist()]
        self._draws = self._draws or any(one != other for one, other in states)
        if self._draws and len(set(states)) > 1:
            self._refuse(states)

    def _state(self) -> int:
        """A 63-bit hash of the states of the default generators."""
        states = {"cpu": torch.random.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return digest([states])

    def _refuse(self, states: Sequence[tuple[int, int]]) -> None:
        mesh = self._mesh
        first = mesh.rank - mesh.tp_rank
        odd = ", ".join(mesh.shape.describe(first + i) for i, state in enumerate(states) if state != states[0])
        if len({before for before, _ in states}) > 1:
            raise RankMismatchError(
                f"{odd} had another random state than {mesh.shape.describe(first)} when a training forward began that "
                "draws random numbers: their dropout masks would differ where all must hold the same activations. Seed "
                "all ranks of a model copy alike: set_seed(seed), without the rank in it."
            )
        raise RankMismatchError(
            f"{odd} had another random state than {mesh.shape.describe(first)} after a training forward, though not "
            "before it: the model seeds itself, or draws inside a sharded layer with a rate that was set after "
            "the model was parallelized. Set dropout rates before training begins, or to 0; or use tp_size 1."
        )


def bytes_of(value: torch.Tensor) -> Any:
    """The values of a tensor on the CPU as a hash takes them, in one operation where that gives them."""
    if value.dtype in _KNOWN_TO_NUMPY and value.is_contiguous():
        return value.numpy().ravel()
    return value.contiguous().reshape(-1).view(torch.uint8).numpy()


def digest(batches: Sequence[Mapping[str, Any]]) -> int:
    """A 63-bit hash of all tensors (names, shapes and values) of a list of batches."""
    state = hashlib.blake2b(digest_size=8)
    for batch in batches:
        for name in sorted(batch):
            value = batch[name]
            if isinstance(value, torch.Tensor):
                data = value.detach().cpu().contiguous()
                state.update(f"{name}{tuple(data.shape)}{data.dtype}".encode())
                state.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(state.digest(), "big") >> 1
