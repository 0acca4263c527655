"""Marks `model.state_dict()` where a rank has a part of the model: good for this run, refused in a file.

`torch.save(model.state_dict())` is how plain loops keep a model. On a rank that has one stage, or rows of a matrix, the file
would hold a part, and nobody would know before it is read. As a copy to go back to (`model.load_state_dict`) or to
average, the same tensors are right: every rank has its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_parallel.compat.torch_tools import pytree
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.optimizers.states import ACROSS


# What brings values out of tensors, into files and into other libraries.
LEAVING = frozenset({"numpy", "__array__", "tolist", "data_ptr", "storage", "untyped_storage", "__dlpack__"})


class PartTensor(Tensor):
    """A tensor of a state dict that is a part of the model; it, and what is computed from it, is not saved."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in LEAVING:
            refuse_part_of_model(f"{func.__name__}() of a tensor of a state_dict()")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.detach().clone())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_part_of_model("saving a tensor of a state_dict()")


class ShardOfState(PartTensor):
    """One that is a shard: single elements may be read and changed, anything else would be that of the shard.

    In code of users that all ranks run alike `tensor_parallel.run.parts` puts shards together before this is asked.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ACROSS or name in COMPARISONS:
            _refuse_shard(name)
        out = super().__torch_function__(func, types, args, kwargs)
        given = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardOfState)), None)
        for leaf in pytree.tree_leaves(out) if given is not None else ():
            if isinstance(leaf, Tensor) and given is not None and leaf.shape != given.shape:
                _refuse_shard(name)
        return out


COMPARISONS = frozenset({"equal", "allclose"})


def _refuse_shard(name: str) -> NoReturn:
    raise UnsupportedError(
        f"{name} of a tensor of a state_dict() with tp_size above 1: this rank has only its shard of the tensor, whose numbers, rows "
        "and views are not those of the whole. Do it in a callback or a method of a Trainer, on all ranks, where shards are put "
        "together; in a loop of your own take whole weights from accelerator.get_state_dict(model), called on every rank."
    )


def refuse_part_of_model(what: str) -> NoReturn:
    """End what would write a part of the model as if it were all of it.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"{what}: this rank has only its part of the model (its stages with pp_size above 1, its shards with "
        "tp_size above 1 or zero.stage 3) and of the optimizer's state (with any zero.stage). Call accelerator.get_state_dict(model) "
        "on every rank, which gives rank 0 the whole model; or model.save_pretrained(folder) or accelerator.save_model(model, "
        "folder) on every rank, which write it; or accelerator.save_state(folder), which writes the optimizer's state too."
    )


def _refuse_to_save(protocol: Any) -> NoReturn:
    refuse_part_of_model("saving a tensor of a state_dict()")


def _refuse_to_save_parameter(protocol: Any) -> NoReturn:
    refuse_part_of_model("saving a parameter of the model")


ShardOf = Callable[[nn.Module, str, Tensor], Tensor | None]


def _mark(shard_of: ShardOf, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for key, value in state.items():
        if not key.startswith(prefix) or not isinstance(value, Tensor):
            continue
        shard = shard_of(module, key[len(prefix) :], value)
        if shard is not None and shard is not value:
            state[key] = shard
        elif not isinstance(value, nn.Parameter):  # with keep_vars the parameters themselves were asked for
            state[key] = _marked(value, PartTensor if shard is None else ShardOfState)


def _marked(value: Any, kind: type[PartTensor] = PartTensor) -> Any:
    """The same memory under another object, which is not saved."""
    if isinstance(value, DTensor):
        alias = value.detach()
        vars(alias)["__reduce_ex__"] = _refuse_to_save
        return alias
    return value.as_subclass(kind) if type(value) is Tensor else value


def _name_all(
    names_of_tied: Sequence[Sequence[str]], module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Give a tied tensor all the names that it has in one process, as one object.

    Code that averages name by name meets it there as often as it has names, and a deep copy of the state dict keeps it one
    tensor: such an average moves twice a step.
    """
    for names in names_of_tied:
        keys = [prefix + name for name in names]
        held = next((state[key] for key in keys if key in state), None)
        if held is not None:
            state.update(dict.fromkeys(keys, held))


def mark_parts(
    model: nn.Module,
    take_whole: Callable[[dict[str, Any], str], None],
    shard_of: ShardOf,
    names_of_tied: Sequence[Sequence[str]],
) -> None:
    """Mark what the state dicts of a model and its modules have from now on, and its parameters; let it take a whole one.

    Args:
        model: Model of which this rank holds a part.
        take_whole: Puts this rank's part in the place of whole tensors; given a state dict to change and the prefix of its keys.
        shard_of: Given a module, the attribute and a tensor of its state dict: what to show if it is sharded over tensor-parallel
            ranks, the same tensor or one that stands for the whole; None if it is not.
        names_of_tied: All names in the whole model of each tensor here that has several.
    """

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        take_whole(state, prefix)

    for module in model.modules():
        module.register_state_dict_post_hook(functools.partial(_mark, shard_of))
    for parameter in model.parameters():  # a loop may write them by themselves; whoever pickles asks the object
        vars(parameter)["__reduce_ex__"] = _refuse_to_save_parameter
    model.register_state_dict_post_hook(functools.partial(_name_all, names_of_tied))
    model.register_load_state_dict_pre_hook(take)


def marked_state(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict as this rank has it, good to go back to and refused in a file."""
    return _with_tensors(state, _marked)


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """The same with ordinary tensors, for the optimizer."""
    return _with_tensors(state, lambda tensor: tensor.as_subclass(Tensor) if type(tensor) is PartTensor else tensor)


def _with_tensors(state: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    held = {key: pytree.tree_map(change, value) for key, value in state.get("state", {}).items()}
    return {**state, "state": held}
