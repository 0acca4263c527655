"""All ranks begin with the weights of rank 0, as replicas do under DDP.

A seed with the rank in it, or a head or adapters drawn after unequal draws, give every rank another model. Cut or copied as
they are, replicas would stay different for ever and the parts of one copy would come from several models. So tensors are
compared before anything is cut, by a number each, and those that differ are sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_parallel.compat.torch_tools import is_traceable_wrapper_subclass, parts_of
from hf_parallel.errors import RankMismatchError, UnsupportedError


CHUNK = 1 << 16  # words of 8 bytes that are hashed together: they fit a cache
SEED = 0x5EED
WRAPS: Callable[[object], bool] = is_traceable_wrapper_subclass
MOST, LEAST = 2**63 - 1, -(2**63)


@dataclass(frozen=True)
class Start:
    """Result of comparing the weights of all ranks with those of rank 0.

    Args:
        sent: Names of the tensors that differed and now have rank 0's values, in module order.
        num_tensors: Tensors compared.
        have_same_tensors: Whether all ranks have tensors of the same names, shapes and dtypes; nothing was compared if not.
    """

    sent: tuple[str, ...] = ()
    num_tensors: int = 0
    have_same_tensors: bool = True

    def describe(self) -> list[str]:
        """A line that says what was sent; none if nothing was."""
        if not self.sent:
            return []
        return [
            f"the ranks began with different weights: {len(self.sent)} of {self.num_tensors} tensors (first: "
            f"{self.sent[0]}) took the values of rank 0, as under DDP. Seed all ranks alike to spare it."
        ]


@torch.no_grad()
def begin_alike(model: nn.Module) -> Start:
    """Give all ranks the parameters and buffers of world rank 0; collective over the world.

    Args:
        model: Whole. Tensors without values (on `meta`) are left out, and DTensors. Of tensors that wrap others
            (quantised values with their scales) the parts are compared.

    Raises:
        UnsupportedError: Quantised weights differ: what belongs to them is not in the tensor alone.
        RankMismatchError: Some ranks have frozen what others train; on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Start()
    _refuse_unlike_freezing(model)
    packed = dict(_packed(model))
    tensors = dict(_tensors(model)) | packed
    structure = hashlib.sha256(str([(n, tuple(t.shape), t.dtype) for n, t in tensors.items()]).encode())
    word = int.from_bytes(structure.digest()[:8], "big", signed=True)
    if differing([word], None):
        return Start(have_same_tensors=False)
    odd = differing(fingerprints(tensors.values()), None)
    names = list(tensors)
    quantised = [names[i] for i in odd if names[i] in packed or _is_quantised(tensors[names[i]])]
    if quantised:
        raise UnsupportedError(
            f"{quantised[0]} ({len(quantised)} of {len(names)} tensors) has quantised values that differ over the ranks, which "
            "cannot be sent: their scales are elsewhere. Load the same checkpoint on every rank, and quantise it alike."
        )
    for index in odd:
        _send(tensors[names[index]])
    return Start(tuple(names[i] for i in odd), len(names))


def _refuse_unlike_freezing(model: nn.Module) -> None:
    """Refuse parameters that are frozen on some ranks only: which ones are laid out, cut and sent must be known to all; collective."""
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    names = hashlib.sha256("\n".join(trained).encode()).digest()
    if differing([int.from_bytes(names[:8], "big", signed=True)], None):
        return  # `begin_alike` says so
    odd = differing([int(is_trained) for is_trained in trained.values()], None)
    if odd:
        raise RankMismatchError(
            f"{list(trained)[odd[0]]} ({len(odd)} of {len(trained)} parameters) is frozen (requires_grad=False) on some ranks and "
            "trained on others: all train one model. Code before the Trainer or accelerator.prepare() freezes it on some ranks only "
            "(`if rank == 0:`, `if accelerator.is_main_process:`). Do it on every rank."
        )


@torch.no_grad()
def refuse_unlike_parts(
    held: Mapping[str, Tensor], shared: Mapping[str, tuple[dist.ProcessGroup | None, Sequence[str]]], what: str
) -> None:
    """Refuse tensors that should be equal over a group and are not: they were read from files that differ.

    Args:
        held: Names and tensors of this rank.
        shared: Axis -> its group, and the names that its ranks compare, the same on all of them; who does not hold one
            leaves it out.
        what: Origin of the tensors.

    Raises:
        RankMismatchError: Names the first tensor and the axis; on every rank of the group.
    """
    numbers = dict(zip(held, fingerprints(held.values()), strict=True))
    for axis, (group, names) in shared.items():
        odd = [] if group is None else differing([numbers.get(name) for name in names], group)
        if odd:
            raise RankMismatchError(
                f"{names[odd[0]]} ({len(odd)} of {len(names)} tensors) differs over {axis}: {what} is not the same on every "
                "rank. Copy the same files to every machine, or put them on a disk that all share."
            )


def differing(numbers: Sequence[int | None], group: dist.ProcessGroup | None) -> list[int]:
    """Positions at which ranks of a group have different numbers; collective, None: over the world.

    Args:
        numbers: Numbers, as many on every rank; None where this rank has nothing to compare.
        group: Ranks that compare.
    """
    if not numbers:
        return []
    device = wire_device(group)
    least, most = (
        torch.tensor([neutral if n is None else n for n in numbers], dtype=torch.int64, device=device)
        for neutral in (MOST, LEAST)
    )
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return torch.nonzero(least < most).flatten().tolist()


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """A number for the bits of each tensor; waits for the device once."""
    multipliers: dict[torch.device, Tensor] = {}
    made: dict[torch.device, list[tuple[int, Tensor]]] = {}
    count = 0
    for count, tensor in enumerate(tensors, 1):
        device = tensor.device
        if device not in multipliers:
            generator = torch.Generator().manual_seed(SEED)
            drawn = torch.randint(LEAST, MOST, (CHUNK,), generator=generator)
            multipliers[device] = (drawn | 1).to(device)
        made.setdefault(device, []).append((count - 1, _fingerprint(tensor, multipliers[device])))
    found = [0] * count
    for each in made.values():
        values = torch.stack([value for _, value in each]).tolist()
        for (index, _), value in zip(each, values, strict=True):
            found[index] = value
    return found


def _fingerprint(tensor: Tensor, multipliers: Tensor) -> Tensor:
    """Sum of mixed words of 8 bytes, each multiplied by a number of its place (0-d int64, modulo 2**64)."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in _words(tensor).split(CHUNK):
        mixed = chunk * multipliers[: chunk.numel()]
        # Without this step two flipped signs in the highest bits would cancel out.
        mixed ^= mixed >> 32
        total = total * 6364136223846793005 + mixed.sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, i[n]: eight a word where they are a multiple of eight, else one."""
    flat = _plain(tensor).contiguous().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    if flat.nbytes % 8 == 0 and (flat.storage_offset() * flat.element_size()) % 8 == 0:
        return flat.view(torch.int64)
    return flat.view(torch.uint8).to(torch.int64)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer that has values, once, in module order; buffers that are not saved too."""
    sources: tuple[Callable[[], Iterable[tuple[str, Tensor]]], ...] = (model.named_parameters, model.named_buffers)
    for source in sources:
        for name, tensor in source():
            if not tensor.is_meta and tensor.numel() and not WRAPS(tensor):
                yield name, tensor


def _packed(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parts of tensors that wrap others; what of a DTensor is here differs over the ranks by design."""
    for name, tensor in model.named_parameters():
        if not isinstance(tensor, DTensor):
            for key, part in parts_of(tensor).items():
                if not part.is_meta and part.numel():
                    yield f"{name}.{key}", part


def _is_quantised(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not (tensor.is_floating_point() or tensor.is_complex())


def _send(tensor: Tensor) -> None:
    """Overwrite a tensor with that of world rank 0; collective."""
    device = wire_device(None)
    arriving = _plain(tensor).to(device, copy=True).contiguous()
    if arriving.dtype == torch.bool:
        arriving = arriving.view(torch.uint8)
    dist.broadcast(arriving, src=0)
    values = arriving.view(tensor.dtype).to(tensor.device)
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if overlaps:
        tensor.data = values
    else:
        _plain(tensor).copy_(values)


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device that the group can send from: the GPU for NCCL, the CPU for gloo."""
    nccl = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
