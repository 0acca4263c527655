"""Dropout rates and the epsilons of norms must be the same on all ranks that compute with a module, or they train several models.

`if accelerator.is_main_process: model.model.layers[0].mlp.dropout.p = 0.0`, or `eval()` of a part there, changes them on one rank. A
digest of them is part of the word of the optimizers' settings, which rides on messages that are sent anyway. Modules are looked at in
few steps: what is unlike mostly stays so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from torch import nn


FIRST = 3  # steps, the first ones, in which modules are looked at; later in those whose number is a power of two
# Exact names: what modules keep of statistics ("dropped", a share of tokens) may differ.
DROPOUTS = frozenset(
    {
        *(
            "dropout",
            "dropout_p",
            "dropout_prob",
            "dropout_rate",
            "attention_dropout",
            "attn_dropout",
            "hidden_dropout",
        ),
        *("activation_dropout", "classifier_dropout", "drop_prob", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
    }
)
DROPPING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
EPSILONS = frozenset({"eps", "epsilon", "variance_epsilon", "layer_norm_eps", "rms_norm_eps"})


class RatesOfModules:
    """The rates by which a model's modules drop now, none in evaluation mode, and their epsilons.

    Args:
        model: The model, as this rank holds it.

    Attributes:
        digest: Digest of what was found last; empty before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.digest = b""

    def look(self, step: int) -> None:
        """Look at the modules, as a backward pass begins.

        Args:
            step: Optimizer steps before; the same on all ranks.
        """
        if step < FIRST or step & (step - 1) == 0:
            self.digest = hashlib.blake2b(repr(self.told()).encode(), digest_size=8).digest()

    def told(self) -> dict[str, str]:
        """Name of an attribute -> its value, as text."""
        return {
            f"{prefix}.{key}".lstrip("."): repr(value)
            for prefix, module in self._model.named_modules()
            for key, value in _rates_of(module)
        }


def _rates_of(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Names and values; a rate counts as zero where it drops nothing: a model without dropout may be in either mode."""
    for key, value in vars(module).items():
        if type(value) is not float:
            continue
        if key in DROPOUTS or (key == "p" and isinstance(module, DROPPING)):
            yield key, value if module.training else 0.0
        elif key in EPSILONS:
            yield key, value
