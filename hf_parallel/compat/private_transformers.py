"""Private names of transformers."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from dataclasses import fields
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from hf_parallel.compat.overridden import changed_methods, in_this_thread
from hf_parallel.compat.private_torch import is_cross_entropy, is_shipped
from hf_parallel.compat.versions import wanted
from hf_parallel.errors import UnsupportedError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch import Tensor, nn
    from transformers import PreTrainedModel, Trainer
    from transformers.core_model_loading import WeightTransform

IGNORED_LABEL = -100
# Names of the argument and output that hold what attention has seen: "cache" is that of all models since transformers 5.24,
# which still takes the others.
CACHES = ("cache", "past_key_values", "cache_params")
FLAGS_OF_HOOKS = frozenset({"_output_capturing_hooks_installed"})  # on modules that have them


def run_inside_checkpoint(
    block: nn.Module, forward: Callable[[], Any], body: Callable[[Callable[[], Any]], Any]
) -> Any:
    """`body(forward)`, with `body` inside the checkpoint if `block` checkpoints its own forward (transformers' layers).

    Args:
        block: A block of a model.
        forward: A call of its forward.
        body: Calls the function it is given; runs again, with the rest, when the block is recomputed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    name = "_gradient_checkpointing_func"
    checkpoint = vars(block).get(name)
    checkpoints = isinstance(block, GradientCheckpointingLayer) and block.gradient_checkpointing and block.training
    if not checkpoints or checkpoint is None or not torch.is_grad_enabled():  # without gradients 5.24 just runs it
        return body(forward)

    def checkpoint_all(function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(lambda *again: body(lambda: function(*again)), *args)

    vars(block)[name] = checkpoint_all
    try:
        return forward()
    finally:
        vars(block)[name] = checkpoint


def indivisible_modules(model: Any) -> set[str]:
    """Names of the classes whose modules a model wants on one device each: its blocks."""
    return set(getattr(model, "_no_split_modules", None) or ())


def attention_of(config: Any) -> str:
    """The attention implementation that a model of this config has: "sdpa", "eager" or another one's name."""
    return str(config._attn_implementation)


def attention_names(model: nn.Module) -> list[tuple[Callable[[str], None], str]]:
    """Find, for each config of a transformers model, the setter and the present name of its attention implementation.

    Modules get configs of their own first, so that the name does not reach other models made of the same config.
    """
    name, memo = "_attn_implementation_internal", dict[int, Any]()
    for module in model.modules():
        own = vars(module)
        if own.get("config") is not None and name in vars(own["config"]):
            own["config"] = copy.deepcopy(own["config"], memo)
    found: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and name in vars(config):
            found.setdefault(id(config), config)

    def sets(config: Any) -> Callable[[str], None]:
        return lambda value: vars(config).update({name: value})

    return [(sets(config), vars(config)[name] or "eager") for config in found.values()]


@contextlib.contextmanager
def own_attention_names() -> Iterator[None]:
    """Inside, what is registered for names of attention implementations and their masks is gone afterwards."""
    from transformers import AttentionInterface, AttentionMaskInterface

    with mock.patch.dict(AttentionInterface._global_mapping), mock.patch.dict(AttentionMaskInterface._global_mapping):
        yield


@contextlib.contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Inside, a transformers model computes attention in plain ops; models of other makes are left alone."""
    name = "_attn_implementation_internal"
    configs = {id(config): config for m in model.modules() if (config := vars(m).get("config")) is not None}
    before = [(config, vars(config)[name]) for config in configs.values() if name in vars(config)]
    try:
        for config, _ in before:
            vars(config)[name] = "eager"
        yield
    finally:
        for config, value in before:
            vars(config)[name] = value


@contextlib.contextmanager
def masks_without_values() -> Iterator[None]:
    """Inside, transformers makes masks of tensors on `meta` as it does of traced ones: without a look at their values."""
    from torch import Tensor
    from transformers import masking_utils

    before = vars(masking_utils).get("is_tracing")
    if before is None:  # another release asks in another way, or not at all
        yield
        return

    def is_tracing(tensor: Any = None) -> Any:
        return before(tensor) or (isinstance(tensor, Tensor) and tensor.is_meta)

    vars(masking_utils)["is_tracing"] = is_tracing
    try:
        yield
    finally:
        vars(masking_utils)["is_tracing"] = before


def of_documents(mask_function: Callable[..., Any], positions: Tensor, documents: Tensor) -> Callable[..., Any]:
    """A mask under which the documents of a packed row do not see each other, as transformers makes it.

    Args:
        mask_function: Mask function of one document.
        positions: i[B S], position ids.
        documents: i[B S], the number of the document of each token.
    """
    from transformers import masking_utils

    remap = vars(masking_utils).get("remap_positions_for_packed_sequence")
    if remap is not None:  # 5.22 counts windows and chunks from the start of the row
        mask_function = remap(mask_function, positions)
    apart = masking_utils.packed_sequence_mask_function(documents)
    return masking_utils.and_masks(apart, mask_function)


def cache_output() -> str:
    """The name that the stock Trainer leaves out of predictions where a model's config names none."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    names = [field.name for field in fields(CausalLMOutputWithPast)]
    return next(name for name in CACHES if name in names)


def calling_trainer() -> Trainer | None:
    """The `Trainer` whose constructor is running in the calling stack.

    Callbacks are handed model and optimizer but not the Trainer itself, and they are called from its constructor.
    """
    from transformers import Trainer

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back
    return None


# Methods of the stock Trainer that a parallel one overrides, each with the names of its parameters. One that is renamed would
# never be called, one with other parameters would be handed the wrong ones.
OVERRIDDEN = {
    "_clip_grad_norm": "model",
    "_get_grad_norm": "model grad_norm",
    "_get_num_items_in_batch": "batch_samples device",
    "_get_output_dir": "trial",
    "_get_train_sampler": "train_dataset",
    "_load_best_model": "",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_load_rng_state": "checkpoint",
    "_load_scaler": "checkpoint",
    "_maybe_log_save_evaluate": "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate",
    "_prepare_inputs": "inputs",
    "_push_from_checkpoint": "checkpoint_folder",
    "_run_epoch": (
        "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval start_time "
        "resume_from_checkpoint epochs_trained steps_trained_in_current_epoch"
    ),
    "_save": "output_dir state_dict",
    "_save_checkpoint": "model trial",
    "_save_optimizer_and_scheduler": "output_dir",
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "create_optimizer": "model",
    "evaluate": "eval_dataset ignore_keys metric_key_prefix",
    "evaluation_loop": "dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    "get_batch_samples": "epoch_iterator num_batches device",
    "floating_point_ops": "inputs",
    "get_total_train_batch_size": "args",
    "log": "logs start_time",
    "predict": "test_dataset ignore_keys metric_key_prefix",
    "prediction_step": "model inputs prediction_loss_only ignore_keys",
    "save_model": "output_dir _internal_call",
    "train": "resume_from_checkpoint trial ignore_keys_for_eval",
    "training_step": "model inputs num_items_in_batch",
}


# What a batch passes on its way from `get_batch_samples` to the model, and its loss on the way to the gradients.
AFTER_DATA = (
    "training_step",
    "compute_loss",
    "compute_loss_context_manager",
    "_prepare_inputs",
    "_prepare_input",
    "_prepare_context_parallel_inputs",
)


def trainer_internals(stock: type[Trainer] | None = None) -> None:
    """Refuse a transformers whose Trainer lacks a method that hf_parallel overrides, or gives it other parameters.

    Args:
        stock: The stock class; None for transformers' own.

    Raises:
        UnsupportedError: Names the methods and the version range that has them.
    """
    import transformers

    stock = stock or transformers.Trainer
    changed = changed_methods(stock, OVERRIDDEN)
    if changed:
        raise UnsupportedError(
            f"transformers {transformers.__version__}: Trainer has {'; '.join(changed)}. Install {wanted('transformers')}."
        )


def loss_shifts_labels(model: Any) -> bool:
    """Whether the model's loss predicts token i+1 at position i, so that labels[..., 0] is never a target."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    base = getattr(model, "get_base_model", None)  # of a PEFT wrapper
    model = base() if callable(base) else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is not None and "loss_function" not in code.co_names:
        # A loss of its own: those of decoder halves (BartForCausalLM) do not shift; code that does names it so.
        return any(name.startswith("shift") for name in code.co_varnames)
    # transformers takes the causal loss for a class name that it cannot place (GPT2LMHeadModel).
    return LOSS_MAPPING.get(str(getattr(model, "loss_type", None)), ForCausalLMLoss) is ForCausalLMLoss


def other_task(model: Any) -> str | None:
    """The task that the class of a model is named for, if it is no language model: "SequenceClassification"."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss

    language = (ForCausalLMLoss, ForMaskedLMLoss)
    tasks = [task for task, loss in LOSS_MAPPING.items() if task.startswith("For") and loss not in language]
    names = (cls.__name__ for cls in type(model).__mro__)
    return next((task.removeprefix("For") for name in names for task in tasks if name.endswith(task)), None)


def is_causal_loss(function: Any) -> bool:
    """Whether `function` is transformers' loss of causal language models, it and what it calls as they are shipped."""
    from torch import nn
    from transformers.loss import loss_utils

    source, parts = loss_utils.__file__, vars(loss_utils)
    return (
        is_shipped(function, "ForCausalLMLoss", source)
        and function.__defaults__ == (None, IGNORED_LABEL, None)
        and is_shipped(parts.get("fixed_cross_entropy"), "fixed_cross_entropy", source)
        and parts["fixed_cross_entropy"].__defaults__ == (None, IGNORED_LABEL)
        and parts.get("nn") is nn
        and is_cross_entropy(nn.functional.cross_entropy)
    )


def loss_functions(model: Any) -> tuple[Any, ...]:
    """Objects that decide what the model's own loss computes; the same ones as long as nobody replaces any."""
    from torch.nn import functional
    from transformers.loss import loss_utils

    own = getattr(model, "loss_function", None)
    bound = (getattr(own, "__func__", own), getattr(own, "__self__", None))
    return (*bound, loss_utils.fixed_cross_entropy, functional.cross_entropy)


def copy_loss_function(model: Any, target: Any) -> None:
    """Give a model of the same class the loss that somebody chose for `model` after it was made."""
    own = vars(model).get("_loss_function")
    if own is not None:
        bound_to_model = isinstance(own, MethodType) and own.__self__ is model
        target.loss_function = MethodType(own.__func__, target) if bound_to_model else own
    if "loss_type" in vars(model):
        target.loss_type = model.loss_type


def makes_inputs_trained(hook: Any) -> bool:
    """Whether it is the hook that `enable_input_require_grads` puts on embeddings, as activation checkpointing does."""
    from transformers import PreTrainedModel

    stock = inspect.unwrap(PreTrainedModel.enable_input_require_grads).__code__.co_consts
    return isinstance(hook, FunctionType) and any(hook.__code__ is one for one in stock)


def copy_activation_checkpointing(module: nn.Module, target: nn.Module) -> None:
    """Let a module run again in the backward as another one does, and what it returns take part in the backward."""
    for key in ("gradient_checkpointing", "_gradient_checkpointing_func"):
        if key in vars(module):
            setattr(target, key, vars(module)[key])
    for hook in module._forward_hooks.values():
        if makes_inputs_trained(hook):
            target.register_forward_hook(hook)


@contextlib.contextmanager
def replaced_loading(load: Callable[..., Any], find: Callable[..., Any]) -> Iterator[None]:
    """Inside, in this thread, `from_pretrained` finds the files of a checkpoint and loads them through these two.

    Args:
        load: Called with the stock function that fills a model, then with its arguments.
        find: Called with the stock function that finds the files, then with its arguments.

    Raises:
        UnsupportedError: This transformers loads in another way.
    """
    from transformers import PreTrainedModel, modeling_utils

    stock_load = vars(PreTrainedModel).get("_load_pretrained_model")
    stock_find = vars(modeling_utils).get("_get_resolved_checkpoint_files")
    if not isinstance(stock_load, staticmethod) or stock_find is None:
        import transformers

        raise UnsupportedError(
            f"transformers {transformers.__version__} loads weights in a way that is not known. "
            f"Install {wanted('transformers')}, or load without hf_parallel.sharded_loading."
        )
    loads = in_this_thread(partial(load, stock_load.__func__), stock_load.__func__)
    finds = in_this_thread(partial(find, stock_find), stock_find)
    setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(loads))  # noqa: B010
    setattr(modeling_utils, "_get_resolved_checkpoint_files", finds)  # noqa: B010
    try:
        yield
    finally:
        setattr(PreTrainedModel, "_load_pretrained_model", stock_load)  # noqa: B010
        setattr(modeling_utils, "_get_resolved_checkpoint_files", stock_find)  # noqa: B010


def weight_transforms(model: PreTrainedModel) -> list[WeightTransform] | None:
    """Conversions of a checkpoint's tensors that transformers did when it loaded `model`, or would do; None without any.

    Source: transformers 5.23, `core_model_loading.revert_weight_conversion`.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    transforms: list[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    if transforms is not None:
        return transforms
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in found if not isinstance(transform, PrefixChange)] or None


def weights_left_out(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Names that `save_pretrained` never saves, and patterns of names that it leaves out where they are tied."""
    from transformers import modeling_utils

    tied = getattr(modeling_utils, "_get_tied_weight_keys", None)
    if tied is None:
        raise UnsupportedError(f"transformers does not tell which weights are tied: install {wanted('transformers')}.")
    return list(getattr(model, "_keys_to_ignore_on_save", None) or ()), tied(model)


def set_train_batch_size(trainer: Trainer, rows: int) -> None:
    """Give a Trainer that is made already another number of rows of a batch.

    Raises:
        UnsupportedError: It keeps the number elsewhere.
    """
    if not isinstance(vars(trainer).get("_train_batch_size"), int):
        raise UnsupportedError(f"this Trainer keeps its batch size elsewhere: install {wanted('transformers')}.")
    trainer.args.per_device_train_batch_size = rows
    vars(trainer)["_train_batch_size"] = rows
