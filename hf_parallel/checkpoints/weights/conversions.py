"""Match the tensors of a checkpoint with those of a model, and back, one group of tensors at a time.

The rules are transformers' own. transformers converts names, and for some models tensors (the experts of a layer are
stored one by one and held as one tensor). Its two functions do that with all tensors at hand; here the same rules, in
the same order, only sort the names into groups, so that a group can be converted when its tensors are wanted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)


@dataclass
class Group:
    """Tensors that are converted together.

    Args:
        target: Name of the first result.
        transform: Conversion by transformers.
        sources: (pattern of the transform, name of the tensor) in order.
    """

    target: str
    transform: WeightTransform
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def only_renames(self) -> bool:
        """Whether the one result is the one source."""
        return not isinstance(self.transform, WeightConverter)

    @property
    def names(self) -> list[str]:
        """Names of the sources."""
        return [name for _, name in self.sources]

    def convert(self, tensors: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """The results by name, from the sources by name; on any device, `meta` too."""
        transform: Any = copy.deepcopy(self.transform)  # only its subclasses convert
        for pattern, name in self.sources:
            transform.add_tensor(self.target, name, pattern, tensors[name])
        made = transform.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def groups_to_load(
    model: PreTrainedModel, transforms: Sequence[WeightTransform], names: Iterable[str]
) -> dict[str, Group]:
    """First result -> group, for the tensors of a checkpoint that the model has a place for.

    Source: transformers 5.23, `core_model_loading.convert_and_load_state_dict_in_model`.
    """
    transforms = copy.deepcopy(list(transforms))  # some remember what they have seen
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    groups: dict[str, Group] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
        if target not in known:
            continue
        if pattern is None:
            groups.setdefault(target, Group(target, WeightRenaming(name, target))).sources.append((name, name))
        else:
            groups.setdefault(target, Group(target, copy.deepcopy(by_pattern[pattern]))).sources.append(
                (pattern, name)
            )
    return groups


def groups_to_save(transforms: Sequence[WeightTransform] | None, names: Sequence[str]) -> list[Group]:
    """The groups that turn a model's tensors into those of a checkpoint, in the order in which they are saved.

    Args:
        transforms: Conversions by which the model was loaded; None: nothing is converted.
        names: The model's tensors in its own order.

    Source: transformers 5.23, `core_model_loading.revert_weight_conversion`.
    """
    if transforms is None:
        return [Group(name, WeightRenaming(name, name), [(name, name)]) for name in names]
    reverse = [transform.reverse_transform() for transform in transforms[::-1]]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, Group] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            target = apply_renamings(name, renamings)
            groups.setdefault(target, Group(target, WeightRenaming(name, target))).sources.append((name, name))
        else:
            group = groups.setdefault(
                target, _Renamed(target, copy.deepcopy(by_pattern[pattern]), renamings=renamings)
            )
            group.sources.append((pattern, name))
    return list(groups.values())


@dataclass
class _Renamed(Group):
    """A conversion whose results get their final names afterwards: renamings may act on parts of its patterns."""

    renamings: list[WeightRenaming] = field(default_factory=list)

    def convert(self, tensors: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """The results by their final names."""
        made = super().convert(tensors, model)
        return {apply_renamings(name, self.renamings): tensor for name, tensor in made.items()}
