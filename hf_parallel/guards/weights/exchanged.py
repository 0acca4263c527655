"""Notices parameters that were exchanged after the model was prepared: optimizer and reduction would go on with the old.

Values may be changed at any time (`p.data.clamp_()`, `load_state_dict`, `p.data = ...`); the object, its shape and its type may
not, nor may the modules that have parameters somewhere in the model: a new head would run, and the old one would be trained and saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from hf_parallel.compat.private_torch import own_modules, own_parameters
from hf_parallel.errors import UnsupportedError


class WeightGuard:
    """The places of a model's parameters, and what belongs there.

    Args:
        model: The model, cut and sharded.
        parameters: Name -> this rank's parameter.
        everywhere: Names of all parameters of the whole model, wherever they are.
        gathered_of: Gives the tensor that a module has in place of a parameter while that is gathered.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        everywhere: Iterable[str] = (),
        gathered_of: Callable[[Tensor], Tensor | None] = lambda parameter: None,
    ) -> None:
        self._gathered_of = gathered_of
        self._modules = _places_of_modules(model, everywhere)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._places = [
            (names[id(parameter)], own_parameters(module), key, parameter)
            for module in model.modules()
            for key, parameter in own_parameters(module).items()
            if parameter is not None and id(parameter) in names
        ]
        self._kinds = [(name, p, p.shape, p.dtype) for name, p in parameters.items()]

    def check(self) -> None:
        """Refuse, before a training forward pass or an optimizer step, weights that are not those that were prepared.

        Raises:
            UnsupportedError: Names a module or parameter that another has replaced, or that was given another shape or type.
        """
        self.check_objects()
        for name, parameter, shape, dtype in self._kinds:
            if parameter.dtype != dtype:
                raise UnsupportedError(
                    f"parameter {name} was cast from {dtype} to {parameter.dtype} (model.to, model.half) after the model was "
                    "prepared: gradient buffers and messages between ranks are made for the type of before. Cast the model before "
                    "accelerator.prepare() or trainer.train()."
                )
            if parameter.shape != shape:
                raise UnsupportedError(
                    f"parameter {name} was given data of shape {tuple(parameter.shape)} after the model was prepared: this rank "
                    f"holds {tuple(shape)} of it. Assign this rank's part, or change weights before training."
                )

    def check_objects(self) -> None:
        """Refuse replaced modules and parameters before weights are gathered, which may have been cast.

        Raises:
            UnsupportedError: Names a module or parameter that another has replaced.
        """
        for name, modules, key, module in self._modules:
            if modules.get(key) is not module:
                raise UnsupportedError(
                    f"module {name} was replaced or taken out after the model was prepared: optimizer, gradient reduction and "
                    "checkpoints hold the parameters of the one before. Change the model before training, or change values in "
                    "place (`with torch.no_grad(): parameter.copy_(new)`); merge adapters in what was saved, not while ranks have "
                    "parts of them."
                )
        for name, table, key, parameter in self._places:
            found = table.get(key)
            if found is not parameter and (found is None or found is not self._gathered_of(parameter)):
                raise UnsupportedError(
                    f"parameter {name} was replaced by another object after the model was prepared: optimizer, gradient "
                    "reduction and checkpoints hold the one of before, so the new one would not be trained. Change its values "
                    "(`with torch.no_grad(): parameter.copy_(new)`, or `parameter.data = new`), or replace it before training."
                )


def _places_of_modules(
    model: nn.Module, names: Iterable[str]
) -> list[tuple[str, dict[str, nn.Module | None], str, nn.Module]]:
    """Name, table, key and module of every module with parameters in it, also where a rank has none of them."""
    prefixes: set[str] = set()
    for name in names:
        while "." in name:
            name = name.rpartition(".")[0]
            prefixes.add(name)
    modules, found = dict(model.named_modules(remove_duplicate=False)), []
    for name in sorted(prefixes & modules.keys()):
        parent, _, key = name.rpartition(".")
        found.append((name, own_modules(modules[parent]), key, modules[name]))
    return found
