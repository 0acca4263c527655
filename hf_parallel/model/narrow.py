"""A narrow model that stands for a wide one where plans and checks take values: same blocks and code, fewer channels.

What a plan says does not depend on widths but for sizes, and a check of a cut compares what flows where. The values and the
time of the real widths would only be spent. The narrow model has random weights; that it runs as the wide one does is shown
by one forward of each on `meta`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_parallel.compat.private_peft import base_model, with_adapters_of
from hf_parallel.compat.private_quantised import quantise_as, shape_of
from hf_parallel.compat.private_torch import own_buffers
from hf_parallel.compat.private_transformers import copy_activation_checkpointing, copy_loss_function
from hf_parallel.model.fewer import READS_VALUES, is_stock, same_ops
from hf_parallel.model.meta import inputs_on_meta, on_meta
from hf_parallel.model.record import Record, record_forward
from hf_parallel.model.stack import PLACES
from hf_parallel.model.unchanged import unchanged
from hf_parallel.model.widths import narrow_configs


FAINT: Final = 0.02  # the least one: what blocks add gets lost in comparisons if it is far below
SMALL: Final = 2**20  # elements of a model that costs next to nothing to plan and check as it is
TEXT: Final = frozenset({"input_ids", "attention_mask", "labels", "position_ids", "token_type_ids"})
IDS: Final = ("input_ids", "labels")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A model that runs as a wide one does.

    Args:
        model: The narrow model, with random weights.
        vocab_size: Vocabulary size of its text.
        record: Record of its forward on `meta`.
    """

    model: nn.Module
    vocab_size: int
    record: Record

    def batch(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of the wide model with ids that the narrow one has."""
        return with_fewer_words(sample, self.vocab_size)


def with_fewer_words(sample: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """A batch of text with ids of 0 .. vocab_size - 1; labels below 0 stay."""
    made = dict(sample)
    for name in IDS:
        if isinstance(value := sample.get(name), Tensor):
            made[name] = torch.where(value < 0, value, value % vocab_size)
    return made


def narrow_model(model: nn.Module, stack: str, sample: Mapping[str, Any], *, parts: int = 1) -> Narrow | None:
    """A narrow model of the same structure, None where none is smaller or it cannot be shown that it runs alike.

    Args:
        model: Whole, on any device; its values are not looked at.
        stack: Name of the list of its blocks.
        sample: A batch of text.
        parts: See `narrow_configs`.
    """
    config = _config_of(model)
    if not (isinstance(config, PretrainedConfig) and _is_wide(model)):
        return None

    def judged(made: PretrainedConfig) -> tuple[nn.Module, int, Record | None] | None:
        narrow = _built(model, made)
        if not has_shapes_of(narrow, model, _ratios(made, config)):
            return None
        return narrow, made.get_text_config().vocab_size, forward_if_alike(narrow, model, stack, sample)

    narrow, vocab_size, record = first_narrow(config, judged, parts=parts) or (model, 0, None)
    return None if record is None else Narrow(narrow, vocab_size, record)


def first_narrow(
    config: PretrainedConfig, judge: Callable[[PretrainedConfig], T | None], *, parts: int = 1, vocabulary: bool = True
) -> T | None:
    """The first result of `judge` on narrower configs, the narrowest first; None where it accepts none.

    Args:
        config: Config of the wide model.
        judge: Makes a model of a narrower config and compares it with the wide one; None, or an error, if they are not alike.
        parts: See `narrow_configs`.
        vocabulary: See `narrow_configs`.
    """
    for made in narrow_configs(config, parts=parts, vocabulary=vocabulary):
        with suppress(Exception):  # a config may insist on widths in any way, and code may need values
            found = judge(made)
            if found is not None:
                return found
    return None


def _config_of(model: nn.Module) -> Any:
    """The config of a model, or of the one that adapters were put on; None without one of its own."""
    return vars(base_model(model)).get("config")


def _is_wide(model: nn.Module) -> bool:
    return sum(p.numel() for p in model.parameters()) > SMALL


def forward_if_alike(narrow: nn.Module, wide: nn.Module, stack: str, sample: Mapping[str, Any]) -> Record | None:
    """A forward of the narrow one of two models, on `meta`; None where it is not shown that both run alike.

    Args:
        narrow: Narrow model of the same class.
        wide: Wide model with a config.
        stack: Name of the list of their blocks.
        sample: A batch of text.
    """
    plain = all(name in TEXT for name, value in sample.items() if isinstance(value, Tensor))
    if not (plain and is_stock(wide, quantised=True) and _is_wide(wide)):
        return None
    ratios = _ratios(_config_of(narrow), _config_of(wide))
    if not (has_shapes_of(narrow, wide, ratios) and _has_settings_of(narrow, wide, ratios)):
        return None
    records = [_recorded(one, stack, sample) for one in (narrow, wide)]
    reads = any(name in op.name for op in records[1].ops for name in READS_VALUES)
    return None if reads or not same_ops(*records) else records[0]


def largest_block(model: nn.Module) -> int:
    """Elements of the largest module of a list of modules."""
    blocks = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    return max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0)


def has_shapes_of(narrow: nn.Module, wide: nn.Module, ratios: frozenset[int] | None = None) -> bool:
    """Whether both have the same parameters and buffers, tied alike, but for widths that are multiples.

    Args:
        narrow: The narrow model.
        wide: The wide model.
        ratios: Multiples by which a width of the wide model may be larger; None: any number. A width that is put together of
            parts is a multiple by one of these only if each of its parts is.
    """
    here, there = _tensors(narrow), _tensors(wide)

    def is_scaled(small: int, large: int) -> bool:
        if small == large or not small:
            return small == large
        return large % small == 0 and (ratios is None or large // small in ratios)

    def is_alike(one: Tensor, other: Tensor) -> bool:
        shapes = shape_of(one), shape_of(other)
        return one.ndim == other.ndim and all(map(is_scaled, *shapes))

    named = here.keys() == there.keys() and _ties(here) == _ties(there)
    return named and all(is_alike(tensor, there[name]) for name, tensor in here.items())


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    every: Any = {"remove_duplicate": False}
    return dict(itertools.chain(model.named_parameters(**every), model.named_buffers(**every)))


def _ties(tensors: Mapping[str, Tensor]) -> set[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {tuple(sorted(group)) for group in names.values()}


def _built(model: nn.Module, config: PretrainedConfig) -> nn.Module:
    """A model of the config in the state of another one: dtypes, device, what is frozen and what trains, its loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = type(base_model(model))(config)
        strengthen(base)
        quantise_as(base, base_model(model))
        made = with_adapters_of(model, base)
        strengthen(made)  # the adapters
    there = dict(model.named_parameters())
    for name, parameter in made.named_parameters():
        other = there[name]
        parameter.data = parameter.data.to(other.device, other.dtype)
        parameter.requires_grad_(other.requires_grad)
    modules = dict(made.named_modules())
    for name, module in model.named_modules():
        modules[name].training = module.training
        copy_activation_checkpointing(module, modules[name])
        buffers = own_buffers(modules[name])
        for key, buffer in own_buffers(module).items():
            mine = buffers.get(key)
            if mine is not None and buffer is not None:
                buffers[key] = mine.to(buffer.device, buffer.dtype)
    copy_loss_function(base_model(model), base_model(made))
    return made


def strengthen(model: nn.Module) -> None:
    """Draw fresh matrices again that are zero or next to it: a block that adds nothing computes nothing wrong. In place.

    Configs may name any spread, and weights that were trained have grown since; products of several small ones get lost.
    """
    for parameter in model.parameters():
        is_matrix = parameter.is_floating_point() and parameter.ndim > 1 and not parameter.is_meta
        if is_matrix and float(parameter.detach().norm()) < FAINT / 2 * parameter.numel() ** 0.5:
            nn.init.normal_(parameter, std=FAINT)


def _has_settings_of(narrow: nn.Module, wide: nn.Module, ratios: frozenset[int]) -> bool:
    """Whether both are made of the same classes with the same settings, but for numbers that follow from widths."""
    here, there = dict(narrow.named_modules()), dict(wide.named_modules())
    if here.keys() != there.keys():
        return False
    for name, module in here.items():
        other = there[name]
        if type(module) is not type(other):
            return False
        mine, theirs = _settings(module), _settings(other)
        if mine.keys() != theirs.keys() or not all(_is_scaled(mine[key], theirs[key], ratios) for key in mine):
            return False
    return True


def _settings(module: nn.Module) -> dict[str, Any]:
    """Plain values that the code of a module may read, but its place; transformers notes loading under private names."""
    plain = (int, float, bool, str, type(None))
    named = {key: value for key, value in vars(module).items() if type(value) in plain and not key.startswith("_")}
    return {key: value for key, value in named.items() if not any(word in key for word in PLACES)}


def _is_scaled(narrow: Any, wide: Any, ratios: frozenset[int]) -> bool:
    """Whether a number is the same, one of the ratios larger, or a scale that is a power or a root of a width."""
    if narrow == wide or type(narrow) not in (int, float) or type(narrow) is not type(wide) or not narrow or not wide:
        return bool(narrow == wide)
    if type(narrow) is int:
        return wide % narrow == 0 and wide // narrow in ratios
    square = max(narrow / wide, wide / narrow) ** 2
    return any(math.isclose(square, expected, rel_tol=1e-6) for n in ratios for expected in (n, n * n))


def _ratios(narrow: PretrainedConfig, wide: PretrainedConfig) -> frozenset[int]:
    """The factors by which the sizes in the config of the wide model are larger."""
    here, there = vars(narrow.get_text_config()), vars(wide.get_text_config())
    pairs = [(value, there[key]) for key, value in here.items() if type(value) is int and value != there[key]]
    return frozenset(large // small for small, large in pairs)


def _recorded(model: nn.Module, stack: str, sample: Mapping[str, Any]) -> Record:
    with unchanged(model), on_meta(model):
        return record_forward(model, stack, [stack], model.forward, inputs_on_meta(sample))
