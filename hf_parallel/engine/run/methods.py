"""Methods of a parallelized model beside its forward: copying, resizing, saving and clearing gradients by itself.

Each would act on this rank's part as if it were the model. They do what they do in one process where they can, and are refused
with another way where they cannot.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.errors import UnsupportedError


def install_methods(
    model: nn.Module, replicas: Replicas, forward: Callable[..., Any] | None, *, in_parts: bool
) -> None:
    """Replace methods of the model's instance.

    Args:
        model: The model.
        replicas: Reduction over the replicas; says whether the optimizer or the parameters are partitioned.
        forward: The forward that the instance had before ours; None for that of its class.
        in_parts: Whether this rank has a part of the model.
    """
    methods = vars(model)
    if replicas.partitions:
        methods["resize_token_embeddings"] = _refuse_resize
        methods["zero_grad"] = functools.partial(_zero_grad, model.zero_grad, replicas)
    if in_parts:
        methods["__deepcopy__"] = _refuse_copy
        methods["resize_token_embeddings"] = _refuse_resize
        if hasattr(model, "merge_and_unload"):  # of PEFT
            methods |= {name: functools.partial(_refuse_unload, name) for name in ("merge_and_unload", "unload")}
        own = getattr(model, "save_pretrained", None)
        if own is not None:  # a module of the user's round a model has none, and is saved as stock saves it
            methods["save_pretrained"] = _whole_only(own)
    else:
        methods["__deepcopy__"] = functools.partial(_copy_whole, model, forward)


def _zero_grad(own: Callable[..., None], replicas: Replicas, set_to_none: bool = True) -> None:
    """`model.zero_grad()`: with ZeRO the gradients that count are those of the optimizer's parts."""
    own(set_to_none)  # which changes what stands for them to zeros, if it is not to drop them
    if set_to_none:
        replicas.zero_grad()


def _whole_only(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained` that insists on the gathered weights: by itself it would write this rank's part as the model."""

    def save(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            raise UnsupportedError(
                "model.save_pretrained() on a parallelized model would save this rank's part as if it were all. Call "
                "trainer.save_model(folder), or pass state_dict=accelerator.get_state_dict(model)."
            )
        return save_pretrained(*args, **kwargs)

    return save


def _refuse_resize(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "resize_token_embeddings() was called after the model was prepared, with pp_size or tp_size above 1 or with ZeRO: ranks hold "
        "parts of the embedding or of its optimizer's state. Call it before trainer.train() or accelerator.prepare()."
    )


def _refuse_unload(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        f"{name}() of a model of which this rank has a part (pp_size or tp_size above 1, or zero.stage 3): the layers that it puts back "
        "are not those that are trained, gathered and saved. Save the adapters on every rank (trainer.save_model(folder)), and merge them "
        "in one process: AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload(). merge_adapter() works, until "
        "unmerge_adapter()."
    )


def _copy_whole(model: nn.Module, patched: Callable[..., Any] | None, memo: dict[int, Any]) -> nn.Module:
    """A copy of a whole model (an EMA makes one) runs its own forward: ours would run this model's weights."""
    names = [
        name for name in ("forward", "__deepcopy__", "zero_grad", "no_sync", "save_pretrained") if name in vars(model)
    ]
    ours: dict[str, Any] = {name: vars(model).pop(name) for name in names}
    if patched is not None:
        vars(model)["forward"] = patched
    try:
        return copy.deepcopy(model, memo)
    finally:
        vars(model).update(ours)


def _refuse_copy(memo: object) -> NoReturn:
    raise UnsupportedError(
        "copy.deepcopy of a parallelized model: its stages and shards belong to this rank's process groups. For a moving average keep "
        "copies of this rank's weights by name ({n: p.detach().clone() for n, p in model.named_parameters()}), and write them back with "
        "p.copy_ under torch.no_grad(); for a whole model save it with trainer.save_model() and load that."
    )
