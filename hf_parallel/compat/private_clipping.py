"""Private names of torch's gradient clipping: what it finds over no gradients at all, and what asked it."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from types import FrameType
from typing import Any

from hf_parallel.compat.versions import wanted
from hf_parallel.errors import UnsupportedError


_DEEPEST = 40  # frames between a norm and the call of torch's clipping that asks for it
ANSWERING: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # of `answer_norms_of_nothing`
_NUMBERS = itertools.count()


def answer_norms_of_nothing(owner: Any) -> None:
    """Let torch's clipping ask `owner.norm_of_nothing(norm_type)` for a norm over no gradients; None is torch's own, 0.

    Args:
        owner: Asked as long as it lives.
    """
    from torch import Tensor
    from torch.nn import utils
    from torch.nn.utils import clip_grad

    ANSWERING[next(_NUMBERS)] = owner
    stock: Any = getattr(clip_grad, "_get_total_norm", None)
    code = getattr(getattr(clip_grad.clip_grad_norm_, "__wrapped__", None), "__code__", None)
    if stock is None or code is None or not {"parameters", "is_generator"} <= {*code.co_varnames}:
        raise UnsupportedError(f"this torch clips gradients in another way: install {wanted('torch')}.")
    if stock.__module__ == __name__:
        return

    @functools.wraps(stock, assigned=("__name__", "__doc__"))
    def total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        asks = (
            not given and clips_one() is False
        )  # a parameter without a gradient, clipped by itself, concerns no other stage
        # The newest first, and the first that answers: what is collective comes in one order on all ranks.
        owners = [owner for _, owner in sorted(ANSWERING.items(), reverse=True)] if asks else []
        answers = (one.norm_of_nothing(float(norm_type)) for one in owners)
        answer = next((answer for answer in answers if answer is not None), None)
        return stock(given if answer is None else [answer], norm_type, *args, **kwargs)

    clip_grad._get_total_norm = utils.get_total_norm = total_norm


def clips_one() -> bool | None:
    """Whether torch's clipping, in whose call this is, was given one tensor by itself; None for a list of one.

    It makes a list of both, so the reason of a norm is in its frame only.
    """
    from torch import Tensor

    found: bool | None = False
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            break
        name, where, told = frame.f_code.co_name, frame.f_globals.get("__name__"), frame.f_locals
        if name == "total_norm" and where == __name__:
            single = isinstance(told["tensors"], Tensor)
            found = True if single else None if len(told["given"]) == 1 else False
        elif name == "clip_grad_norm_" and where == "torch.nn.utils.clip_grad":
            if "is_generator" not in told:
                return True
            return None if len(told["parameters"]) == 1 and not told["is_generator"] else False
        frame = frame.f_back
    return found
