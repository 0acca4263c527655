"""Changes in place of torch's DTensors, as code of users makes them between two steps of an optimizer: each rank changes its part.

All of these change DTensors of the whole process: the calls are the user's, on parameters and gradients, from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_parallel.compat.private_dtensor import overloads_of, stock_result
from hf_parallel.compat.private_dtensor_losses import number_of
from hf_parallel.compat.private_torch import in_backward_pass


# What changes a tensor by numbers, or by another tensor.
CHANGES = (
    *("add_", "sub_", "mul_", "div_", "pow_", "copy_", "zero_", "fill_", "lerp_", "addcmul_", "addcdiv_", "neg_"),
    *("clamp_", "clamp_min_", "clamp_max_", "masked_fill_", "nan_to_num_"),
    *("_foreach_add_", "_foreach_sub_", "_foreach_mul_", "_foreach_div_", "_foreach_zero_", "_foreach_copy_"),
    *("_foreach_lerp_", "_foreach_neg_", "_foreach_clamp_min_", "_foreach_clamp_max_"),
)


def note_changes_of_parts(
    counts: Callable[[Tensor], bool], note_change: Callable[[str, Iterable[object]], None]
) -> None:
    """Pass on what is done in place to parts, and with which numbers: a rank that does it alone changes its rows only.

    Args:
        counts: Whether a change of a part does.
        note_change: Gets the name of each function, and the numbers that it is given, a tensor of one element as it is, None for others.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # `whole_numbers_of_parts` has looked for them

    def noting(inner: Any) -> Any:
        def run(func: Any, args: Any, kwargs: Any) -> Any:
            first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
            if isinstance(first, DTensor) and not in_backward_pass() and counts(first):
                note_change(func._schema.name, map(number_of, (*args[1:], *(kwargs or {}).values())))
            return stock_result(handlers, func, args, kwargs) if inner is None else inner(func, args, kwargs)

        vars(run).update(vars(inner) if inner is not None else {}, notes_changes=True)
        return run

    for func in overloads_of(CHANGES):
        if not hasattr(handlers.get(func), "notes_changes"):
            handlers[func] = noting(handlers.get(func))
