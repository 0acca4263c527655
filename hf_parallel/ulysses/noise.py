"""NEFTune's noise on the embeddings of whole rows, of which each rank adds its part.

Its hook makes noise the smaller the more tokens a row has. On a part of a row it would be too large, and of other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

from hf_parallel.compat.private_torch import module_hooks
from hf_parallel.ulysses.draws import Draws
from hf_parallel.ulysses.whole import WholeRows


@contextmanager
def noise_of_whole_rows(
    model: nn.Module, length: int, cut: Callable[[Tensor], Tensor], draws: Draws, whole: WholeRows
) -> Iterator[None]:
    """Inside, the hooks that `neftune_noise_alpha` puts on embeddings add this rank's part of the noise of one process.

    For a moment this needs the noise of whole rows.

    Args:
        model: The model.
        length: Tokens of a row.
        cut: This rank's part of a tensor f[B S H].
        draws: The random numbers of this forward.
        whole: Parts of the model that begin on whole rows, where noise is not needed.
    """

    def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if whole.begins or not module.training:
            return output
        with draws.alike(), torch.no_grad():
            nothing = output.new_zeros(len(output), length, output.shape[-1])  # (batch, seq, hidden)
            noise = neftune_post_forward_hook(module, args, nothing)
        return output + cut(noise)

    tables = [module_hooks(module)[1] for module in model.modules()]
    found = [
        (hooks, key) for hooks in tables for key, hook in hooks.items() if hook is neftune_post_forward_hook
    ]  # a late one too, as after an evaluation
    for hooks, key in found:
        hooks[key] = add
    try:
        yield
    finally:
        for hooks, key in found:
            hooks[key] = neftune_post_forward_hook
