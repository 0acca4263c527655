"""A model that knows where its weights are and has not read them.

Its parameters are on the `meta` device: shapes and dtypes, no memory. Whatever is done to a model before it trains (freezing,
casting, moving, tying, cutting, sharding) works on them as on any others; `Unread.fill` reads what is left in the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from hf_parallel.checkpoints.agree import raise_anywhere
from hf_parallel.checkpoints.weights.before_reading import follow, unfollow
from hf_parallel.checkpoints.weights.conversions import Group
from hf_parallel.checkpoints.weights.writer import Reader, Stored
from hf_parallel.compat.torch_tools import move_everything, move_values_only
from hf_parallel.errors import CheckpointError, ConfigError, UnsupportedError
from hf_parallel.ledger import Entry, Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.pipeline_parallel.run.cut import settle_placeholders
from hf_parallel.settings.config import HFParallelConfig


logger = logging.getLogger(__name__)

RECORD = "hf_parallel_unread"


@dataclass(frozen=True)
class Source:
    """Origin of a tensor of the model in the checkpoint.

    Args:
        group: Tensors of the checkpoint that are read and converted for it.
        dtype: Dtype it is read in; a later cast of the model comes on top.
        shape: Its whole shape.
    """

    group: Group
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Wanted:
    """A tensor of the model that has no values yet.

    Args:
        names: All names it has there.
        tensor: The tensor, maybe a part of what it was.
        places: Every module and key that holds it.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    places: tuple[tuple[nn.Module, str], ...]


class Unread:
    """The record of a model's unread weights.

    Args:
        config: The settings it was loaded for.
        stored: Tensors of the checkpoint by name.
        sources: The model's tensors by name.

    Attributes:
        num_bytes: Bytes read from the checkpoint so far.
        num_elements: Elements of the model's tensors filled so far.
    """

    def __init__(self, config: HFParallelConfig, stored: Mapping[str, Stored], sources: Mapping[str, Source]) -> None:
        self.config, self.stored, self.sources = config, stored, sources
        self.num_bytes = self.num_elements = 0
        self.casts: dict[str, list[torch.dtype]] = {}  # of each tensor between loading and reading, in order
        self._hook: Any = None

    def settle(self, model: nn.Module) -> None:
        """Make `model` a model that may be passed to a Trainer: it can be moved and cast, and refuses to run or to be resized."""
        vars(model)[RECORD] = self
        vars(model)["resize_token_embeddings"] = _refuse_to_resize
        move_values_only(model)
        follow([one.tensor for one in wanted_of(model)])
        self._hook = model.register_forward_pre_hook(_refuse_to_run)

    def begin(self, model: nn.Module) -> None:
        """Prepare for the model to be parallelized: shapes may run from here on. Collective.

        Raises:
            CheckpointError: Values were changed that are not there yet; the same text on every rank.
        """
        casts, changed = unfollow({one.names[0]: one.tensor for one in wanted_of(model)})
        self.casts |= casts
        raise_anywhere(
            changed
            and f"{changed} was changed before it was read: the model was loaded with hf_parallel.sharded_loading, and has no values "
            "to change until training begins. Change it in a callback's on_train_begin, or load the model without sharded_loading."
        )
        vars(model).pop("resize_token_embeddings", None)
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    @contextmanager
    def aside(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model looks as its library made it: plans and checks of a model that something was put on are not remembered."""
        vars(model).pop(RECORD, None)
        move_everything(model)
        try:
            yield
        finally:
            vars(model)[RECORD] = self
            move_values_only(model)

    def check(self, config: HFParallelConfig) -> None:
        """Refuse to train with other settings than were loaded for.

        Raises:
            ConfigError: Names both.
        """
        mine, theirs = (one.to_yaml_section() for one in (self.config, config))
        if mine != theirs:
            keys = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
            differences = "; ".join(
                f"{key}: {mine.get(key)!r} for loading, {theirs.get(key)!r} for training" for key in keys
            )
            raise ConfigError(
                f"the model was loaded for other settings than it is trained with: {differences}. Give both the same, or none: "
                "both then read the file given to `accelerate launch`."
            )

    @torch.no_grad()
    def fill(self, model: nn.Module, ledger: Ledger | None, mesh: Mesh, device: torch.device) -> None:
        """Read what `model` still holds; collective.

        Args:
            model: Cut and sharded, or whole.
            ledger: Ledger of the whole model, for the layouts of shards; None: the model is whole.
            mesh: This rank's mesh.
            device: Device of the values.

        Raises:
            CheckpointError: A file or tensor cannot be read on some rank; the same text on every rank.
        """
        problem = None
        try:
            self._fill(model, ledger, mesh, device)
        except Exception as error:  # noqa: BLE001  raised below, on every rank
            problem = error
        raise_anywhere(problem)
        settle_placeholders(model, device)
        vars(model).pop(RECORD, None)
        move_everything(model)

    def _fill(self, model: nn.Module, ledger: Ledger | None, mesh: Mesh, device: torch.device) -> None:
        reader = Reader()
        for group, wanted in self._by_group(wanted_of(model)):
            entries = [None if ledger is None else ledger.find(one.names[0]) for one in wanted]
            if group.only_renames:
                for one, entry in zip(wanted, entries, strict=True):
                    source = self.sources[self._known(one)]
                    values = self._read_part(reader, self.stored[group.names[0]], source, one, entry, mesh)
                    self._put(one, values.to(source.dtype), device)
                continue
            dtype = self.sources[group.target].dtype
            tensors = {name: reader.read(self.stored[name]).to(dtype) for name in group.names}
            made = group.convert(tensors, model)  # type: ignore[arg-type]  # only its config is read
            del tensors
            for one, entry in zip(wanted, entries, strict=True):
                name = self._known(one)
                whole = made.pop(name)
                self._put(one, _part(whole, one, entry, mesh, self.sources[name].shape), device)
        self.num_bytes += reader.num_bytes

    def _by_group(self, wanted: Sequence[Wanted]) -> Iterator[tuple[Group, list[Wanted]]]:
        found: dict[int, tuple[Group, list[Wanted]]] = {}
        for one in wanted:
            group = self.sources[self._known(one)].group
            found.setdefault(id(group), (group, []))[1].append(one)
        yield from found.values()

    def _known(self, one: Wanted) -> str:
        name = next((name for name in one.names if name in self.sources), None)
        if name is None:
            raise CheckpointError(
                f"{one.names[0]} has no values and was not in the checkpoint: it was put into the model after "
                "hf_parallel.sharded_loading. Load the model without sharded_loading, or change it before it is saved."
            )
        return name

    def _read_part(
        self, reader: Reader, stored: Stored, source: Source, one: Wanted, entry: Entry | None, mesh: Mesh
    ) -> torch.Tensor:
        spec = _layout(one, entry, mesh, source.shape)
        if spec is None:
            return reader.read(stored)
        return reader.read(stored, spec[0], spec[1])

    def _put(self, one: Wanted, values: torch.Tensor, device: torch.device) -> None:
        old = one.tensor
        if values.untyped_storage().nbytes() != values.nbytes or not values.is_contiguous():
            values = values.clone(memory_format=torch.contiguous_format)  # not a view of something larger
        for dtype in self.casts.get(one.names[0], ()):
            values = values.to(dtype)
        values = values.to(device, old.dtype)
        self.num_elements += values.numel()
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(values, requires_grad=old.requires_grad)
            vars(new).update(vars(old))
            torch.utils.swap_tensors(old, new)  # the object stays: optimizers and ties know it
            return
        for module, key in one.places:
            setattr(module, key, values)


def wanted_of(model: nn.Module) -> list[Wanted]:
    """Every parameter and buffer without values, once, in module order."""
    found: dict[int, tuple[torch.Tensor, list[str], list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {"recurse": False, "remove_duplicate": False}
        for key, tensor in [*module.named_parameters(**own), *module.named_buffers(**own)]:
            if tensor.is_meta:
                _, names, places = found.setdefault(id(tensor), (tensor, [], []))
                names.append(f"{prefix}.{key}" if prefix else key)
                places.append((module, key))
    return [Wanted(tuple(names), tensor, tuple(places)) for tensor, names, places in found.values()]


def unread_of(model: nn.Module) -> Unread | None:
    """The record of a model, None if its weights are read.

    Raises:
        UnsupportedError: Only a part of the model was loaded so: it was wrapped after loading.
    """
    record: Unread | None = vars(model).get(RECORD)
    if record is not None:
        return record
    inner = next((name for name, module in model.named_modules() if RECORD in vars(module)), None)
    if inner is not None:
        raise UnsupportedError(
            f"{inner} of {type(model).__name__} was loaded with hf_parallel.sharded_loading and then wrapped (adapters do "
            "that): what the wrapper made of weights that were not read is lost. Load it without sharded_loading."
        )
    return None


def _layout(
    one: Wanted, entry: Entry | None, mesh: Mesh, whole: tuple[int, ...]
) -> tuple[int, list[tuple[int, int]]] | None:
    """Dim and ranges of this rank's part; None for all of it.

    Raises:
        CheckpointError: The tensor has become something else since it was loaded.
    """
    here = tuple(one.tensor.shape)
    if here == whole:
        return None
    spec = entry.spec if entry is not None else None
    if spec is not None and spec.full_size == whole[spec.dim]:
        local = list(whole)
        local[spec.dim] = spec.local_size(mesh.parts.size, mesh.parts.rank)
        if tuple(local) == here:
            return spec.dim, spec.ranges(mesh.parts.size, mesh.parts.rank)
    raise CheckpointError(
        f"{one.names[0]} has shape {here} and was loaded with {whole}: the model was changed after "
        "hf_parallel.sharded_loading (resize_token_embeddings does that). Load it without sharded_loading."
    )


def _part(values: torch.Tensor, one: Wanted, entry: Entry | None, mesh: Mesh, whole: tuple[int, ...]) -> torch.Tensor:
    layout = _layout(one, entry, mesh, whole)
    if layout is None:
        return values
    dim, ranges = layout
    return torch.cat([values.narrow(dim, start, length) for start, length in ranges if length], dim)


def _refuse_to_resize(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "resize_token_embeddings() was called on a model whose weights are not read yet: it was loaded with "
        "hf_parallel.sharded_loading, and new rows are made of those. Load it without sharded_loading."
    )


def _refuse_to_run(model: nn.Module, args: tuple[Any, ...]) -> None:
    raise UnsupportedError(
        f"the weights of {type(model).__name__} are not read yet: it was loaded with hf_parallel.sharded_loading, and each "
        "rank reads its own part when training or evaluation begins. Give it to "
        "Trainer(callbacks=[HFParallelCallback()]) or to an Accelerator with an HFParallelPlugin first."
    )
