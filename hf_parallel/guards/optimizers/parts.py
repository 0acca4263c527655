"""An optimizer of flat parts (ZeRO 1 and 2) as user code knows it: its groups have the model's parameters, its states are theirs.

User code finds the group of a parameter by identity, freezes or decays the parameters of a group, and resets their moments. Among
flat parts it would find nothing and freeze nothing, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from hf_parallel.data_parallel.flat import FlatShard, is_per_element
from hf_parallel.data_parallel.loss_numbers import NUMBERS
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.optimizers.states import Shown, StateOfPart, refuse_of_its_shape


class ShownOptimizer:
    """The groups and states that a partitioned optimizer shows in place of those of its flat parts.

    Args:
        zero: The partition.
        parameters: Name -> the model's parameter.
    """

    def __init__(self, zero: ZeroPartition, parameters: Mapping[str, nn.Parameter]) -> None:
        self._zero = zero
        self._members = [[parameters[name] for name in group] for group in zero.groups]
        self._touched: list[_Place] = []  # a step of which user code has looked at no state costs nothing
        self._places = {
            id(parameter): _Place(name, parameter, shard, position, self._touched)
            for shard in zero.shards
            for position, (name, parameter) in enumerate(zip(shard.bucket.names, shard.bucket.params, strict=True))
        }
        self._shown: list[_Group] = []

    def groups(self) -> list[Any]:
        """The optimizer's groups: settings as they are there, and the model's parameters."""
        real = self._zero.optimizer.param_groups
        if [id(group.real) for group in self._shown] != list(map(id, real)):
            later = [group["params"] for group in real[len(self._members) :]]  # added since: not partitioned
            members = [*self._members, *later]
            self._shown = [_Group(group, _Fixed(each)) for group, each in zip(real, members, strict=True)]
        return _Fixed(self._shown)

    def states(self) -> MutableMapping[Any, Any]:
        """The optimizer's states by parameter of the model, of which this rank has some elements each."""
        return _States(self._zero.optimizer.state, self._places)

    def has(self, parameter: Tensor) -> bool:
        """Whether the optimizer updates a parameter in parts."""
        return id(parameter) in self._places

    def settle(self) -> None:
        """Apply to a flat part's state what user code did to those of all its parameters; before a step, and before a save.

        Raises:
            UnsupportedError: It was done to some of them only.
        """
        touched = {id(place.shard): place.shard for place in self._touched}
        for shard in touched.values():
            places = [place for place in self._places.values() if place.shard is shard]
            _settle(self._zero.optimizer.state, places)
        self._touched.clear()


def _settle(states: MutableMapping[Any, Any], places: Sequence[_Place]) -> None:
    master = places[0].shard.master
    removed = [place for place in places if place.is_removed]
    if removed:
        if len(removed) < len(places):
            removed[0].refuse("its state was removed")
        states.pop(master, None)
    for key in dict.fromkeys(key for place in places for key in place.numbers):
        changed = [
            place for place in places if key in place.numbers and place.numbers[key][0] != place.numbers[key][1]
        ]
        values = [place.numbers[key][1] for place in changed]
        if changed and (len(changed) < len(places) or any(value != values[0] for value in values)):
            changed[0].refuse(f"{key} of its state was changed")
        if changed:
            states[master][key] = values[0]
    for place in places:
        place.forget()


class _Fixed(list[Any]):
    """A list that is read: what the optimizer updates is laid out."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_groups()

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> Any:
        return list, (list(self),)


def refuse_groups() -> NoReturn:
    """Refuse to exchange what a partitioned optimizer updates.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        "optimizer.param_groups was given other groups or parameters with zero.stage above 0: the optimizer's flat parts are laid "
        "out for those that it was prepared with. Freeze parameters (requires_grad_(False)), set the lr of a group, add a group "
        "(optimizer.add_param_group), or set zero.stage to 0."
    )


class _Group(Shown):
    """A group of the optimizer with the model's parameters."""

    def __init__(self, real: MutableMapping[Any, Any], members: Sequence[nn.Parameter]) -> None:
        super().__init__(real, lambda key, value: members if key == "params" else value)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key != "params":
            super().__setitem__(key, value)
        elif list(map(id, value)) != list(map(id, self["params"])):
            refuse_groups()


class _Place:
    """Position of a parameter in the flat parts, and what user code did to the state that it shares with others there.

    Args:
        touched: Gets this as soon as something is done.

    Attributes:
        numbers: Key -> one number of the state, which all parameters of the part share, and what it is to user code.
        is_removed: Whether its state was removed.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, shard: FlatShard, position: int, touched: list[_Place]
    ) -> None:
        self.name, self.parameter, self.shard, self.position = name, parameter, shard, position
        self._touched = touched
        self.forget()

    def forget(self) -> None:
        """Forget the numbers that were taken of it, and that it was removed."""
        self.numbers: dict[Any, tuple[Any, Any]] = {}
        self.is_removed = False

    def remove(self) -> None:
        """Note that user code removed its state."""
        self.is_removed = True
        self._touched.append(self)

    def hand_out(self, key: Any, before: Any, now: Any) -> None:
        """Note that user code has a number of its state: what it was, and what it is now."""
        self.numbers[key] = before, now
        self._touched.append(self)

    @property
    def piece(self) -> slice:
        """Elements of the parameter in this rank's part; maybe none."""
        return self.shard.inside(self.position) or slice(0, 0)

    def refuse(self, what: str) -> NoReturn:
        """Refuse what cannot be done to the state of one parameter.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"optimizer.state of parameter {self.name} with zero.stage above 0: {what}, but it shares a flat part, with one step "
            "count, with other parameters. Change its moments (state['exp_avg'].zero_()), do the same to the states of all "
            "parameters (optimizer.state.clear()), or set zero.stage to 0."
        )


class _States(MutableMapping[Any, Any]):
    """States by parameter of the model."""

    def __init__(self, real: MutableMapping[Any, Any], places: Mapping[int, _Place]) -> None:
        self._real, self._places = real, places

    def __getitem__(self, key: Any) -> Any:
        place = self._places.get(id(key))
        if place is None:
            return self._real[key]
        if place.is_removed:
            place.refuse("its state was removed, and is made anew")
        return _State(self._real[place.shard.master], place)

    def __setitem__(self, key: Any, value: Any) -> None:
        place = self._places.get(id(key))
        if place is None:
            self._real[key] = value
        elif len(value):
            place.refuse("its state is replaced")
        else:
            place.remove()

    def __delitem__(self, key: Any) -> None:
        place = self._places.get(id(key))
        if place is None:
            del self._real[key]
        elif key not in self:
            raise KeyError(key)
        else:
            place.remove()

    def __contains__(self, key: object) -> bool:
        place = self._places.get(id(key))
        if place is None:
            return key in self._real
        return place.shard.master in self._real and not place.is_removed

    def pop(self, key: Any, *default: Any) -> Any:
        if default and key not in self:
            return default[0]
        found = self[key]
        del self[key]
        return found

    def __iter__(self) -> Iterator[Any]:
        members: dict[int, list[_Place]] = {}
        for place in self._places.values():
            members.setdefault(id(place.shard.master), []).append(place)
        for key in list(self._real):
            if id(key) in members:
                yield from (place.parameter for place in members[id(key)] if not place.is_removed)
            else:
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        self._real.clear()
        for place in self._places.values():
            place.forget()


class _State(MutableMapping[Any, Any]):
    """The state of a parameter: elements of that of a flat part, and numbers that are its own until they are compared."""

    def __init__(self, real: MutableMapping[Any, Any], place: _Place) -> None:
        self._real, self._place = real, place

    def _per_element(self, key: Any) -> bool:
        return is_per_element(self._real[key], key, self._place.shard.master)

    def __getitem__(self, key: Any) -> Any:
        value = self._real[key]
        if self._per_element(key):
            return value[self._place.piece].as_subclass(StateOfPart)
        if key not in self._place.numbers:
            copies = (value.detach().clone(), value.detach().clone()) if isinstance(value, Tensor) else (value, value)
            self._place.hand_out(key, *copies)
        return self._place.numbers[key][1]

    def __setitem__(self, key: Any, value: Any) -> None:
        place = self._place
        if key not in self._real:
            place.refuse(f"{key}, which it does not have, is set")
        if not self._per_element(key):
            self[key]  # is known from now on
            place.hand_out(key, place.numbers[key][0], value)
            return
        NUMBERS.note_change(str(key), ())
        mine, given = self._real[key][place.piece], value.as_subclass(Tensor)
        if mine.shape != place.parameter.shape:
            refuse_of_its_shape(f"{key} = ...", [mine], [value])
        if given.shape == place.parameter.shape != mine.shape:
            part = place.shard.part_of(place.position, given)
            given = mine if part is None else part[1]
        mine.copy_(given)

    def __delitem__(self, key: Any) -> None:
        self._place.refuse(f"{key} is removed")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._real)

    def __len__(self) -> int:
        return len(self._real)

    def __deepcopy__(self, memo: Any) -> Any:
        found = self.items()
        return {k: v.as_subclass(Tensor).detach().clone() if isinstance(v, Tensor) else v for k, v in found}
