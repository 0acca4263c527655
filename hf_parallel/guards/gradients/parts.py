"""The gradient of one parameter, where this rank holds a part of it: what user code does to the whole reaches the part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from hf_parallel.data_parallel.flat import FlatShard
from hf_parallel.data_parallel.loss_numbers import NUMBERS
from hf_parallel.data_parallel.norms import power_sum
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.gradients.numbers import NumbersOfShards
from hf_parallel.guards.gradients.shards import Shards
from hf_parallel.guards.gradients.stands import refuse_kept


CountRule: TypeAlias = Callable[[str, nn.Parameter], bool | Tensor]


class Owner(Protocol):
    """Knows the gradients of all parameters, and the ranks that have the rest of each."""

    @property
    def counted(self) -> CountRule:
        """Rule for the elements of a parameter that this rank counts in a norm."""
        ...

    @property
    def shards(self) -> Shards:
        """The shards of each parameter."""
        ...

    def power(self, name: str, parameter: nn.Parameter, gradient: Tensor, norm_type: float) -> Tensor:
        """This rank's summand in the norm's sum of powers, for a gradient that is not partitioned."""
        ...

    def gather(self, shard: FlatShard) -> None:
        """Gather the whole gradients of a buffer's parameters; collective over the ranks that share it."""
        ...

    def touch(self) -> None:
        """Note that a gradient is opened, or that autograd adds to it."""
        ...

    def note_parts(self) -> None:
        """Note the optimizer's parts of gradients as they are now, which is right."""
        ...

    @property
    def numbers(self) -> NumbersOfShards:
        """Notes of the numbers that shards are changed by."""
        ...


class _Part:
    """A shard of a gradient, of which user code may have the whole: what it does to that counts."""

    name: str
    is_shard: bool
    _owner: Owner
    opened: Tensor | None = None
    is_summand = False  # other ranks have the rest of it

    def read(self) -> None:
        if self.is_summand:
            refuse_summand(self.name)

    @property
    def memory(self) -> tuple[int, ...]:
        return ()  # a tensor of its own

    def part_from(self) -> None:
        self._owner.touch()

    def tensor(self) -> Tensor:
        raise NotImplementedError

    @property
    def sharded_dim(self) -> int | None:
        return self._owner.shards.sharded_dim(self.name)

    @property
    def full_size(self) -> int:
        return self._owner.shards.full_size(self.name)

    def whole(self, local: Tensor) -> Tensor:
        return self._owner.shards.assemble(self.name, local)

    def cut(self, whole: Tensor) -> Tensor:
        return self._owner.shards.cut(self.name, whole)

    def open(self) -> Tensor:
        """The whole, to be changed in place; collective over tp."""
        if self.opened is None:
            self.opened = self.whole(self.tensor()).clone()
            self._owner.touch()
        return self.opened

    def note(self, given: Sequence[object], parts: Sequence[Tensor] = ()) -> None:
        """Note the numbers among what a shard is changed by, and tensors of its shape."""
        if self.is_shard:
            self._owner.numbers.note(self.name, given)
        for one in parts if self.is_shard else ():
            self._owner.numbers.note_part(self.name, one)

    def close(self) -> None:
        """Let the shard be what counts from now on."""
        self.opened = None

    def _with_opened(self, local: Tensor) -> Tensor:
        if self.opened is not None:
            with torch.no_grad():
                local.copy_(self._owner.shards.cut(self.name, self.opened))
        return local


class LocalGradient(_Part):
    """A gradient that is here, perhaps as a shard."""

    def __init__(self, name: str, parameter: nn.Parameter, gradient: Tensor, owner: Owner) -> None:
        self.name, self.gradient, self.parameter, self._owner = name, gradient, parameter, owner
        self.owned, self.is_shard = owner.shards.owns(name), owner.shards.is_shard(name)
        self.arrived = False

    def tensor(self) -> Tensor:
        return self._with_opened(self.gradient)

    def change(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self.is_summand and "clamp" in str(function):
            refuse_summand(self.name)
        self.note((*args, *kwargs.values()))
        function(self.gradient if self.opened is None else self.opened, *args, **kwargs)

    def arrive(self, gradient: Tensor) -> None:
        self.tensor().add_(gradient)
        self.close()
        self.arrived = True
        self._owner.touch()

    def power(self, norm_type: float, local: Tensor | None) -> Tensor:
        self.read()
        return self._owner.power(self.name, self.parameter, self.tensor() if local is None else local, norm_type)


class FlatGradient(_Part):
    """A gradient whose parts are with the optimizers of several ranks."""

    def __init__(self, name: str, parameter: nn.Parameter, place: tuple[FlatShard, int], owner: Owner) -> None:
        self.name, self.parameter, self._owner = name, parameter, owner
        self.shard, self.position = place
        self.owned, self.is_shard = owner.shards.owns(name), owner.shards.is_shard(name)
        self.gathered: Tensor | None = None
        self.pending: Tensor | None = None
        self._partings = 0

    @property
    def memory(self) -> tuple[int, ...]:
        return self.shard.times, self._partings

    def part_from(self) -> None:
        super().part_from()
        self._partings += 1

    def outdate(self, *, kept: bool = False) -> None:
        """Note that the gradient was cleared: stand-ins that code has kept are of another one, unless they are `kept`."""
        self.gathered = self.opened = None
        self._partings += not kept

    def tensor(self) -> Tensor:
        if self.gathered is None and self.shard.master.grad is None:
            refuse_kept(self.name)
        if self.gathered is None:
            self._owner.gather(self.shard)
        if self.gathered is None:
            raise RuntimeError(f"the gradient of {self.name} was not gathered")
        return self._with_opened(self.gathered)

    def change(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        # Of this rank's part; the text of a function has an address of this process.
        NUMBERS.note_change(function.__name__, (*args, *kwargs.values()))
        self.note((*args, *kwargs.values()))
        if self.gathered is not None:
            function(self.gathered if self.opened is None else self.opened, *args, **kwargs)
            return
        piece, gradient = self.shard.inside(self.position), self.shard.master.grad
        if piece is not None and gradient is not None:
            moved = [arg.to(gradient.device) if isinstance(arg, Tensor) else arg for arg in args]
            function(gradient[piece], *moved, **kwargs)
            self._owner.note_parts()

    def arrive(self, gradient: Tensor) -> None:
        self.pending = gradient.clone() if self.pending is None else self.pending.add_(gradient)

    def power(self, norm_type: float, local: Tensor | None) -> Tensor:
        source = local if local is not None else None if self.gathered is None else self.tensor()
        mine = self.shard.part_of(self.position, source) if source is not None else None
        piece, gradient = self.shard.inside(self.position), self.shard.master.grad
        values = mine[1] if mine is not None else None
        if source is None and piece is not None and gradient is not None:
            values = gradient[piece]
        counted = self._owner.counted(self.name, self.parameter)
        if isinstance(counted, Tensor) and values is not None:
            part = self.shard.part_of(self.position, counted)
            values = values * part[1].to(values.device) if part is not None else None
        kept = [values] if values is not None and counted is not False else []
        return power_sum(kept, norm_type, self.parameter.device)

    @torch.no_grad()
    def take(self, whole: Tensor) -> None:
        """Take this rank's elements of a gradient that user code assigned or changed."""
        found, gradient = self.shard.part_of(self.position, whole), self.shard.master.grad
        if found is None or gradient is None:
            return
        piece, values = found[0], found[1].to(gradient.device)
        if values.dtype == gradient.dtype:
            gradient[piece] = values
        else:  # what was shown rounded and not changed keeps its digits
            gradient[piece] = torch.where(
                gradient[piece].to(values.dtype) == values, gradient[piece], values.to(gradient.dtype)
            )


def refuse_summand(name: str) -> None:
    """Refuse to read or limit a gradient that several ranks have summands of, before they are added up.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"the gradient of {name}, which several stages share (pp_size above 1), which comes of parts of each row (sp_size above 1), or "
        "which is of experts that replicas share (ep_size above 1), is read or limited between two batches of a step: its summands are added up after the last batch. Do it where "
        "accelerator.sync_gradients is true (on_pre_optimizer_step), set gradient_accumulation_steps to 1, or untie the parameter."
    )
