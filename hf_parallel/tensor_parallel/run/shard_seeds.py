"""Random numbers inside a pair: each rank draws its own there, and after it all ranks draw the same again.

Between the first column and the row of a pair every rank works on its own heads or channels: their dropout masks should
be independent, and where the ranks have different numbers of heads they draw differently often. Everywhere else the
ranks hold the same tensors and must draw the same masks. So the random state is saved when a pair is entered and
restored at its row, as with Megatron-LM's model-parallel generator (Shoeybi et al. 2019, arXiv:1909.08053, appendix B.2).

The seed inside comes from the CPU generator, which all ranks advance alike. Whatever restores that generator (a
checkpointed block that runs again, a resumed run, a stage that seeds its microbatches) restores these masks too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.torch_tools import DropoutModule
from hf_parallel.errors import UnsupportedError
from hf_parallel.model.random_streams import generators_of
from hf_parallel.tensor_parallel.run.forwards import put_over
from hf_parallel.tensor_parallel.shard_plan import PairPlan


class PairSeeds:
    """The random state that is saved while a pair of a model runs; one object for each model.

    Args:
        tp_size: Number of ranks.
        tp_rank: This rank.
    """

    def __init__(self, tp_size: int, tp_rank: int) -> None:
        self._tp_size, self._tp_rank = tp_size, tp_rank
        self._row = ""
        self._kept: list[tuple[torch.Generator, Tensor]] = []

    def enter(self, row: str, module: nn.Module, args: Any = None) -> None:
        """Forward pre-hook of what reads the input of the pair that ends in `row`: from here on, draw by rank.

        Raises:
            UnsupportedError: Another pair has been entered and not been left.
        """
        if not module.training or self._row == row:
            return
        if self._row:
            raise UnsupportedError(
                f"{row} and {self._row} are rows of two pairs that run at the same time, and there is dropout inside "
                "them: one random state is kept for one pair. Set the dropout to 0, or gather one of the two layers: "
                f'tensor_parallel.plan: {{"{row}": gather}}.'
            )
        # As many draws as ranks, of which this one uses its own: the generator moves on by the same amount everywhere.
        seeds = torch.randint(2**63 - 1, (self._tp_size,), generator=torch.default_generator, device="cpu")
        self._row = row
        self._kept = [(generator, generator.get_state()) for generator in generators_of(module)]
        for generator, _ in self._kept:
            generator.manual_seed(int(seeds[self._tp_rank]))

    def leave(self, row: str, module: nn.Module | None = None, args: Any = None) -> None:
        """Forward pre-hook of a row: draw as all ranks do. Nothing happens if its pair has not been entered."""
        if self._row != row:
            return
        self._row = ""
        for generator, state in self._kept:
            generator.set_state(state)
        self._kept = []

    @contextlib.contextmanager
    def in_common(self) -> Iterator[None]:
        """Inside, draw what all ranks draw, also inside of a pair."""
        ours = [generator.get_state() for generator, _ in self._kept]
        for generator, state in self._kept:
            generator.set_state(state)
        try:
            yield
        finally:
            self._kept = [(generator, generator.get_state()) for generator, _ in self._kept]
            for (generator, _), state in zip(self._kept, ours, strict=True):
                generator.set_state(state)

    def exchange(self, generator: torch.Generator, state: Tensor) -> Tensor | None:
        """Replace the saved state of `generator` by `state` and return the old one; None outside of pairs."""
        for index, (kept, before) in enumerate(self._kept):
            if kept is generator:
                self._kept[index] = kept, state
                return before
        return None


def install_seeds(model: nn.Module, pair: PairPlan, seeds: PairSeeds, *, row_is_linear: bool) -> None:
    """Let the ranks draw different random numbers inside a pair; a pair without dropout is not changed.

    Args:
        model: The model that has the pair.
        pair: The pair.
        seeds: The model's.
        row_is_linear: Whether the pair ends before its row runs, or (experts) after it.
    """
    root = model.get_submodule(pair.root)
    if not draws(root):
        return
    for name in dict.fromkeys((*pair.columns, *pair.entries)):
        model.get_submodule(name).register_forward_pre_hook(partial(seeds.enter, pair.row))
    row = model.get_submodule(pair.row)
    if row_is_linear:
        row.register_forward_pre_hook(partial(seeds.leave, pair.row))
    else:
        _leave_after(row, seeds, pair.row)
    _leave_after(
        root, seeds, pair.row
    )  # also if it raises: activation checkpointing ends a recomputation by an exception


def draws(root: nn.Module) -> bool:
    """Whether a module may draw random numbers in training: dropout modules, attributes and settings above zero."""
    return any(
        (isinstance(module, DropoutModule) and module.p > 0) or any(rate > 0 for rate in _rates(module))
        for module in root.modules()
        if "tp_dropout" not in vars(module)  # before an adapter: it draws what all ranks draw
    )


def _rates(module: nn.Module) -> Iterator[float]:
    """Numbers that the module or its config calls some dropout.

    Left out are those of heads that no language model has, and layerdrop: it leaves out whole blocks, so it draws outside of pairs.
    """
    config = vars(module).get("config")
    for key, value in [*vars(module).items(), *(vars(config).items() if hasattr(config, "__dict__") else ())]:
        named = "drop" in key and not key.startswith(("summary_", "classifier_")) and "layerdrop" not in key
        if named and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield value


def _leave_after(module: nn.Module, seeds: PairSeeds, row: str) -> None:
    """Leave the pair when `module` returns or raises. No hook: hooks do not run after every kind of exception."""
    if "tp_rows" not in vars(module):
        put_over(module, "tp_rows", {}, _leaving_forward)
    vars(module)["tp_rows"][row] = seeds


def _leaving_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return self.tp_rows_inner(*args, **kwargs)
    finally:
        for row, seeds in self.tp_rows.items():
            seeds.leave(row)
