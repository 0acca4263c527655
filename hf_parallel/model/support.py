"""Refuse models that cannot be cut or sharded, and say why."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from hf_parallel.compat.private_peft import base_model, is_mixed, tuner_layers, why_not_low_rank
from hf_parallel.compat.private_torch import is_compiled, own_parameters
from hf_parallel.compat.private_transformers import other_task
from hf_parallel.compat.torch_tools import sharing_memory
from hf_parallel.errors import UnsupportedError


# Tasks beside that of a language model whose outputs are loss and logits, made of the rows of a batch one by one.
ON_STAGES: Final = ("SequenceClassification", "TokenClassification")


def refuse_model(
    model: nn.Module,
    mp_size: int,
    *,
    tp_size: int = 1,
    sp_size: int = 1,
    shares_parameters: bool = False,
    num_copies: int = 1,
) -> None:
    """Refuse models that would train wrong or crash late.

    Args:
        model: The whole model.
        mp_size: Ranks that hold one copy of it.
        tp_size: Ranks that each of its layers is sharded over.
        sp_size: Ranks that each row is shared over.
        shares_parameters: Whether replicas shard its parameters (ZeRO 3).
        num_copies: Copies of its weights, of replicas and of ranks that share rows.

    Raises:
        UnsupportedError: The model is dispatched, or quantised or wrapped in a way that cannot be cut or sharded.
    """
    name = type(model).__name__
    device_map = getattr(model, "hf_device_map", None)
    if device_map is not None and len(set(device_map.values())) > 1:
        raise UnsupportedError(
            f"{name} was loaded with device_map={sorted(set(map(str, device_map.values())))}: accelerate already "
            "spread it over devices. Load it without device_map; hf_parallel places the stages."
        )
    if mp_size > 1:
        _refuse_task(model, name, mp_size, sp_size)
    method = getattr(model, "quantization_method", None)
    quantised = method is not None or bool(getattr(model, "is_quantized", False))
    named = getattr(method, "value", method) or "unknown method"
    if quantised and tp_size > 1:
        raise UnsupportedError(
            f"{name} has quantised weights ({named}) with tp_size={tp_size}: their scales belong to groups of values, which shards "
            "would cut through. Set tp_size to 1 and train adapters on it with pp_size or replicas, or load it without "
            "quantization_config."
        )
    if quantised and shares_parameters:
        raise UnsupportedError(
            f"{name} has quantised weights ({named}) with zero.stage=3, which shards parameters of one floating-point "
            "dtype. Set zero.stage to 2 or less, or load it without quantization_config."
        )
    _refuse_parted(model, name)
    _refuse_renormed(model, num_copies, mp_size)
    if shares_parameters:
        _refuse_prompts(model, name)
    if mp_size > 1:
        _refuse_compiled(model, mp_size)
        _refuse_shared_memory(model, mp_size)
    if mp_size > 1 and hasattr(model, "peft_config"):
        _refuse_adapters(model, name, mp_size)
    if tp_size > 1:
        _refuse_unsharded(model, tp_size)


def _refuse_compiled(model: nn.Module, mp_size: int) -> None:
    name = next((name for name, module in model.named_modules() if is_compiled(module)), None)
    if name is not None:
        raise UnsupportedError(
            f"{name or type(model).__name__} was compiled in place (module.compile()) with {mp_size} ranks of a model copy: its calls go "
            "past what stages and shards put around modules. Leave that out: pipeline.compile_blocks compiles each block "
            "when the model is cut (not with tp_size, sp_size or ep_size above 1)."
        )


def _refuse_task(model: nn.Module, name: str, mp_size: int, sp_size: int) -> None:
    """Refuse models whose outputs or labels are not those that stages, shards and parts of rows know."""
    task = other_task(base_model(model))
    if task is not None and task not in ON_STAGES:
        raise UnsupportedError(
            f"{name} is made for {task} with {mp_size} ranks a copy (pp_size x tp_size x sp_size): pipeline stages and shards are "
            f"planned for language models, {' and '.join(ON_STAGES)} only. Set these sizes to 1 (replicas, ZeRO), or load it "
            "with AutoModelForCausalLM."
        )
    if task is not None and sp_size > 1:
        raise UnsupportedError(
            f"{name} is made for {task} with sp_size={sp_size}: what it scores is a whole row, or is not known to be exact on "
            "parts of one; rows are shared for causal language models only. Set sp_size to 1 and use pp_size, tp_size or ZeRO."
        )


def _refuse_parted(model: Any, name: str) -> None:
    """Refuse adapters that stock code saves or ties in one process on the CPU only."""
    if is_mixed(model):
        raise UnsupportedError(
            f"{name} has adapters of several methods (mixed=True), which PEFT does not save (PeftMixedModel.save_pretrained). Use "
            "adapters of one method, or train it in one process."
        )
    for config in getattr(model, "peft_config", {}).values():
        tied = getattr(config, "target_modules_to_tie", None)
        if tied:
            raise UnsupportedError(
                f"{name} has an adapter on {', '.join(sorted(tied))} that PEFT ties to the one on the embedding "
                "(LoraConfig.ensure_weight_tying=True) by memory that they share. A Trainer of several processes moves the model to its "
                "device, which parts them, and each would be trained alone. Take one of the two out of target_modules, "
                "set ensure_weight_tying to False, or train both layers with modules_to_save."
            )


def _refuse_renormed(model: nn.Module, num_copies: int, mp_size: int) -> None:
    """Refuse embeddings whose forward rescales the rows that a batch looks up, where others have another batch, or the table too."""
    holders = [id(p) for module in model.modules() for p in own_parameters(module).values()]
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
            continue
        is_tied = mp_size > 1 and holders.count(id(module.weight)) > 1
        if num_copies > 1 or is_tied:
            where = "another module that has the same parameter" if is_tied else f"{num_copies} copies of the weights"
            raise UnsupportedError(
                f"{name} has max_norm={module.max_norm:g} with {where}: its forward rescales the rows that this rank's batch looks up, in "
                "place, so that what other ranks have of the table drifts apart (as under DDP, which does not say so). Set max_norm to "
                "None and rescale all rows on every rank after each step (on_step_end: weight.renorm_(2, 0, max_norm)), or train "
                "with one copy and an embedding that is not tied (pp_size, tp_size)."
            )


def _refuse_shared_memory(model: nn.Module, mp_size: int) -> None:
    """Refuse trained parameters that are two objects in one memory: apart, they would no longer be equal."""
    found = sharing_memory((name, p) for name, p in model.named_parameters() if p.requires_grad and not p.is_meta)
    if found is not None:
        raise UnsupportedError(
            f"parameters {found[0]} and {found[1]} are two objects that share memory, with {mp_size} ranks a copy (pp_size x "
            "tp_size x sp_size): ranks that hold one of them would train it alone (PEFT's ensure_weight_tying makes such adapters). "
            "Tie them by assigning one Parameter to both modules, or set these sizes to 1."
        )


def _refuse_prompts(model: Any, name: str) -> None:
    """Refuse prompts that are learned where parameters are gathered for the forward of a model, before which they are made."""
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedError(
                f"{name} has a {type(config).__name__} with zero.stage=3: its prompts are made before the forward of the model, for "
                "which ZeRO 3 gathers parameters. Set zero.stage to 2 or less, or use adapters in the layers (LoraConfig)."
            )


def _refuse_adapters(model: Any, name: str, mp_size: int) -> None:
    """Refuse adapters that stages and shards do not know."""
    ranks = f"with {mp_size} ranks a copy (pp_size x tp_size x sp_size)"
    if len(model.peft_config) > 1:
        fix = "Remove the others (model.delete_adapter)"
        if "ref" in model.peft_config:
            fix = (
                "TRL copies the adapter of a PeftModel as its reference: give the trainer the base model and peft_config=LoraConfig(...) "
                "instead, whose reference is the base itself, or set precompute_ref_log_probs=True and remove the copy"
            )
        raise UnsupportedError(
            f"{name} has {len(model.peft_config)} adapters ({', '.join(model.peft_config)}) {ranks}: one adapter is trained "
            f"and saved on stages and shards. {fix}; or set these sizes to 1."
        )
    for config in model.peft_config.values():
        if getattr(config, "is_prompt_learning", False) or getattr(config, "is_adaption_prompt", False):
            raise UnsupportedError(
                f"{name} has a {type(config).__name__} {ranks}: prompts that are learned (virtual tokens) enter outside of the "
                "layers, which stages, shards and parts of rows do not know. Use adapters in the layers (LoraConfig), or set "
                "these sizes to 1."
            )


def _refuse_unsharded(model: Any, tp_size: int) -> None:
    """Refuse adapters of which no exact shards are known."""
    for config in getattr(model, "peft_config", {}).values():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise UnsupportedError(
                f"an adapter has peft_type={kind} with tp_size={tp_size}: tensor parallelism shards LORA adapters only. Use "
                "LoraConfig, or set tp_size to 1."
            )
        if getattr(config, "trainable_token_indices", None):
            raise UnsupportedError(
                f"an adapter has trainable_token_indices={config.trainable_token_indices} with tp_size={tp_size}: single rows of "
                "a sharded embedding cannot be trained. Use modules_to_save for the embedding, or set tp_size to 1."
            )
    for name, layer in tuner_layers(model).items():
        why = why_not_low_rank(layer)
        if why:
            raise UnsupportedError(
                f"{name} has an adapter that cannot be sharded with tp_size={tp_size}: {why}. Set "
                "LoraConfig.target_modules to linear layers and embeddings, without use_dora and target_parameters, and call "
                "unmerge_adapter() if it was merged; or set tp_size to 1."
            )
