"""The tensor-parallel plan of a model, from the model or from its config alone.

Blocks of one kind get one plan. So a config is planned with a reduced model: the real widths, random weights, and only as
many blocks as show every kind; the plan of its blocks is then repeated for the others. Blocks are compared on the full model
on the meta device, without values, so no code here is for one architecture.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from hf_parallel.compat.private_transformers import copy_loss_function
from hf_parallel.errors import PlanError
from hf_parallel.machine.ram import free_ram
from hf_parallel.model.fewer import config_with_blocks
from hf_parallel.model.narrow import first_narrow, forward_if_alike, strengthen
from hf_parallel.model.probes import Probes
from hf_parallel.model.stack import candidate_stacks, kind_of
from hf_parallel.model.support import refuse_model
from hf_parallel.settings.sections import ExpertSharing, Treatment
from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.overrides import override_for
from hf_parallel.tensor_parallel.plan.repeated import Repetition, is_within_blocks, repeated
from hf_parallel.tensor_parallel.shard_plan import TPPlan


HEAD_COPIES = 3  # of the head's weight, while its parts are compared with the whole
BLOCK_COPIES = 4  # of a block beside one a rank: itself, its private copy, the reference and gradients

Source: TypeAlias = "nn.Module | PretrainedConfig | Blueprint | str | PathLike[str]"


def plan_for(
    source: Source,
    tp_size: int,
    *,
    sample: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Treatment] | None = None,
    vocabulary: Literal["auto"] | bool = "auto",
    experts: ExpertSharing = "split",
    sequence: bool = False,
) -> TPPlan:
    """Make the tensor-parallel plan that a Trainer makes for a model, without a process group; pure.

    Args:
        source: A whole model with weights; or its config or blueprint, or the name or folder of one, which needs
            memory for as many blocks as there are kinds of them, and for embedding and head. All give the same
            plan; the reasons of rejected pairs may quote numbers, which depend on the weights.
        tp_size: Ranks that share each layer, 1 or more.
        sample: A small batch of the kind the model is trained on; none: made-up text.
        overrides: `tensor_parallel.plan`: pattern of module names -> "pair", "gather" or "replicate".
        vocabulary: `tensor_parallel.vocab_parallel_loss`.
        experts: `tensor_parallel.experts`: "split" or "whole".
        sequence: `tensor_parallel.sequence_parallel`.

    Returns:
        The plan, plain data: `to_json`, `from_json`, `fingerprint`.

    Raises:
        PlanError: It cannot be made, an override does not hold, or a model of random weights needs more memory than is free.
        UnsupportedError: The model is quantised, dispatched over devices, or has adapters other than LoRA.
    """
    settings: dict[str, Any] = {"overrides": overrides, "vocabulary": vocabulary, "experts": experts}
    settings["sequence"] = sequence
    if isinstance(source, nn.Module):
        return _planned(source, tp_size, sample, settings)
    blueprint = (
        source if isinstance(source, Blueprint) else Blueprint(_config_of(source), AutoModelForCausalLM.from_config)
    )
    full = skeleton(blueprint)
    reduced = _reduce(blueprint, full, overrides or {})
    if reduced is not None:
        model = _with_random_weights(reduced.blueprint, reduced.model, tp_size)
        plan = _planned(model, tp_size, sample, settings | {"overrides": _about(overrides or {}, model, full)})
        if is_within_blocks(plan, reduced.blocks.stacks):
            return repeated(plan, reduced.blocks, full)
    return _planned(_with_random_weights(blueprint, full, tp_size), tp_size, sample, settings)


def reduced_model(blueprint: Blueprint) -> nn.Module:
    """A model with random weights and as few blocks as show every kind.

    Raises:
        PlanError: There is not enough memory.
    """
    full = skeleton(blueprint)
    reduced = _reduce(blueprint, full, {})
    return _with_random_weights(*(reduced.blueprint, reduced.model) if reduced is not None else (blueprint, full), 1)


@dataclass(frozen=True)
class Blueprint:
    """Config and constructor from which a model can be made again.

    Args:
        config: Its config.
        build: Makes a model of a config; of values in `dtype`, if that is given.
    """

    config: PretrainedConfig
    build: Callable[..., nn.Module]


def narrow_blueprint(blueprint: Blueprint, sample: Mapping[str, Any], parts: int = 1) -> Blueprint | None:
    """The blueprint of a narrow model of the same structure (see `model.narrow`); None where there is none.

    Args:
        blueprint: Blueprint of the wide model, which is not given values.
        sample: A batch of text.
        parts: A width that is divisible by so many stays so, and one that is not stays not.
    """
    wide = skeleton(blueprint)

    def judged(config: PretrainedConfig) -> Blueprint | None:
        narrow, stack = replace(blueprint, config=config), candidate_stacks(wide, least=1)[0]
        return None if forward_if_alike(skeleton(narrow), wide, stack, sample) is None else narrow

    return first_narrow(blueprint.config, judged, parts=parts)


def blueprint_of(model: nn.Module) -> Blueprint:
    """The blueprint of a model, whose values are not looked at.

    Raises:
        PlanError: The model is not what its config describes, so a model made from the config would be another one.
    """
    if "forward" in vars(model):
        raise PlanError(
            f"the forward of this {type(model).__name__} was replaced, and a model made from its config would run that of its "
            "class. Plan the model with its weights."
        )

    def build(config: PretrainedConfig, dtype: torch.dtype | None = None) -> nn.Module:
        made: nn.Module = type(model)(config)
        copy_loss_function(model, made)
        return made if dtype is None else made.to(dtype)

    blueprint = Blueprint(vars(model)["config"], build)
    described = {(name, tuple(p.shape)) for name, p in skeleton(blueprint).named_parameters()}
    odd = sorted(described ^ {(name, tuple(p.shape)) for name, p in model.named_parameters()})
    if odd:
        raise PlanError(
            f"{type(model).__name__} is not what its config describes (first difference: {odd[0][0]}), so a model made from "
            "it would be another one. Plan the model with its weights."
        )
    return blueprint


def _planned(model: nn.Module, tp_size: int, sample: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> TPPlan:
    refuse_model(model, tp_size, tp_size=tp_size)
    probes = Probes(model, next(model.parameters()).device, sample)
    with probes.running():
        return plan_model(model, tp_size, probes.batch, **settings)


@dataclass(frozen=True)
class _Reduced:
    """A model with fewer blocks, which show every kind.

    Args:
        blueprint: Blueprint with a config of fewer blocks.
        model: The model of the blueprint, on the meta device.
        blocks: Says which of its blocks stands for which of the full model.
    """

    blueprint: Blueprint
    model: nn.Module
    blocks: Repetition

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.model.get_submodule(self.blocks.stacks[0]))  # type: ignore[arg-type]  # a ModuleList


def _config_of(source: PretrainedConfig | str | PathLike[str]) -> PretrainedConfig:
    return source if isinstance(source, PretrainedConfig) else AutoConfig.from_pretrained(source)


def skeleton(blueprint: Blueprint) -> nn.Module:
    """The model, without values."""
    with torch.device("meta"):
        return blueprint.build(copy.deepcopy(blueprint.config))


def _with_random_weights(blueprint: Blueprint, skeleton: nn.Module, tp_size: int) -> nn.Module:
    """The model with random fp32 weights, the same in every call.

    Raises:
        PlanError: It and the copies of its parts need more memory than is free.
    """
    needed, free = _bytes_needed(skeleton, tp_size), _free_bytes()
    if needed > free:
        raise PlanError(
            f"plan_for: a {type(skeleton).__name__} of random weights with its real widths needs {needed / 1e9:.1f} GB "
            f"({_size(skeleton) / 1e9:.2f} billion parameters in fp32 and copies of a block), {free / 1e9:.1f} GB are "
            "free. Plan where there is more memory, and keep the plan: TPPlan.to_json, TPPlan.from_json."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = blueprint.build(copy.deepcopy(blueprint.config), dtype=torch.float32)
        strengthen(model)
    return model


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _bytes_needed(skeleton: nn.Module, tp_size: int) -> int:
    blocks = [block for part in skeleton.modules() if isinstance(part, nn.ModuleList) for block in part]
    head = getattr(skeleton, "get_output_embeddings", lambda: None)()
    copies = (tp_size + BLOCK_COPIES) * max(map(_size, blocks), default=0)
    return 4 * (_size(skeleton) + copies + HEAD_COPIES * (_size(head) if head is not None else 0))


def _free_bytes() -> int:
    return free_ram()


def _about(overrides: Mapping[str, Treatment], reduced: nn.Module, full: nn.Module) -> dict[str, Treatment]:
    """Without the patterns that name other blocks of the full model only."""
    here, there = ([name for name, _ in model.named_modules()] for model in (reduced, full))
    return {
        pattern: treatment
        for pattern, treatment in overrides.items()
        if any(fnmatchcase(name, pattern) for name in here) or not any(fnmatchcase(name, pattern) for name in there)
    }


def _reduce(blueprint: Blueprint, full: nn.Module, overrides: Mapping[str, Treatment]) -> _Reduced | None:
    """The fewest blocks that show every kind, where leaving blocks out changes nothing else; None: keep all."""
    depth = getattr(blueprint.config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(depth, int):
        return None
    stacks = _stacks(full, depth)
    kinds = [_kind_of_block(full, stacks, block, overrides) for block in range(depth)]
    first = [kinds.index(kind) for kind in kinds]
    shown = max(first, default=0) + 2  # one more: the last block feeds none
    if not stacks or shown >= depth:
        return None
    shorter = replace(blueprint, config=config_with_blocks(blueprint.config, depth, range(shown)))
    try:
        model = skeleton(shorter)
    except Exception:  # noqa: BLE001  a config may insist on a depth in any way
        return None
    same = stacks == _stacks(model, shown) and _outside(model, stacks) == _outside(full, stacks)
    if not same or [_kind_of_block(model, stacks, block, overrides) for block in range(shown)] != kinds[:shown]:
        return None
    last = kinds[depth - 1] == kinds[shown - 1]
    middle = tuple(block if block < shown - 1 else first[block] for block in range(depth - 1))
    return _Reduced(shorter, model, Repetition(stacks, (*middle, shown - 1 if last else first[depth - 1])))


def _stacks(model: nn.Module, depth: int) -> tuple[str, ...]:
    """Names of the lists of as many modules as there are blocks, the outermost ones."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == depth and not inside:
            found.append(name)
    return tuple(found)


def _kind_of_block(
    model: nn.Module, stacks: Sequence[str], block: int, overrides: Mapping[str, Treatment]
) -> tuple[Any, ...]:
    """Key of a block, equal for blocks with the same modules, shapes and settings, and the same overrides."""
    kinds: list[Any] = []
    for stack in stacks:
        module = model.get_submodule(f"{stack}.{block}")
        treatments = tuple(override_for(overrides, f"{stack}.{block}.{name}") for name, _ in module.named_modules())
        kinds += [kind_of(module), treatments]
    return tuple(kinds)


def _outside(model: nn.Module, stacks: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Parameters that belong to no block."""
    inner = tuple(f"{stack}." for stack in stacks)
    return [(name, tuple(p.shape)) for name, p in model.named_parameters() if not name.startswith(inner)]
