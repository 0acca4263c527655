"""A stock Trainer that DeepSpeed drives: what was asked for must be what runs, and it may evaluate before it trains."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

from accelerate.utils import DistributedType
from transformers import Trainer
from transformers.integrations.deepspeed import propagate_args_to_deepspeed

from hf_parallel.deepspeed.emit import deepspeed_settings
from hf_parallel.deepspeed.ops import missing_compilers
from hf_parallel.deepspeed.rules import leaves
from hf_parallel.deepspeed.worker import has_cpu_adam
from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.precision import fp16_on_cpu


# Filled in from TrainingArguments.
TRAINERS: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


def refuse_other_runs(trainer: Trainer, config: HFParallelConfig) -> None:
    """Check that accelerate runs the settings of `config`.

    Args:
        trainer: One whose accelerator exists.
        config: Settings with `zero.engine: deepspeed`.

    Raises:
        ConfigError: Every way in which something else than asked for would run.
    """
    problems = [*_engine_problems(trainer), *_precision_problems(trainer, config)]
    if not problems:
        plugin = trainer.accelerator.state.deepspeed_plugin
        asked = deepspeed_settings(config, cpu_adam=has_cpu_adam(config))
        problems = [*_differences(asked, plugin.deepspeed_config)]
    if problems:
        raise ConfigError("\n".join(problems))


def take_over(trainer: Trainer) -> None:
    """Let DeepSpeed and the Trainer have the same sizes, clipping and precision; the Trainer's count."""
    args, plugin = trainer.args, trainer.accelerator.state.deepspeed_plugin
    # The Trainer compares DeepSpeed's precision with its own arguments, which do not know of the launcher's.
    args.bf16 = args.bf16 or args.mixed_precision == "bf16"
    args.fp16 = args.fp16 or args.mixed_precision == "fp16"
    plugin.hf_ds_config.config |= dict.fromkeys(TRAINERS, "auto")
    propagate_args_to_deepspeed(trainer.accelerator, args)
    if plugin.zero_stage < 3:
        _evaluate_before_training(trainer)


def _evaluate_before_training(trainer: Trainer) -> None:
    """Evaluate the model itself until DeepSpeed has it. Below stage 3 it is whole, and the stock Trainer refuses."""
    stock = trainer.evaluation_loop

    @functools.wraps(stock)
    def evaluation_loop(*args: Any, **kwargs: Any) -> Any:
        trainer.is_deepspeed_enabled = trainer.deepspeed is not None
        try:
            return stock(*args, **kwargs)
        finally:
            trainer.is_deepspeed_enabled = True

    vars(trainer)["evaluation_loop"] = evaluation_loop


def _engine_problems(trainer: Trainer) -> Iterator[str]:
    if trainer.args.deepspeed is not None:
        yield (
            "TrainingArguments(deepspeed=...) beside zero.engine=deepspeed: one run has one DeepSpeed config, and it is made "
            "from the zero section. Remove the argument, or set zero.engine to auto and zero.stage to 0."
        )
    kind = trainer.accelerator.distributed_type
    if kind != DistributedType.DEEPSPEED:
        yield (
            f"zero.engine=deepspeed, but accelerate runs {kind.value}: it was set up before hf_parallel knew the settings. Import "
            "hf_parallel first and give the settings to the launcher, or make HFParallelCallback before the Trainer."
        )


def _precision_problems(trainer: Trainer, config: HFParallelConfig) -> Iterator[str]:
    precision = trainer.args.mixed_precision
    if trainer.args.device.type != "cpu":
        return
    if config.zero.offload_param == "nvme" and precision == "no":
        # DeepSpeed 0.19.8, partition_parameters.py, _set_dtype: without fp16 a dtype that is given is not read.
        yield (
            "zero.offload_param=nvme in fp32 on the CPU: DeepSpeed would round parameters to bf16 on their way to the files. Set "
            "bf16=True, or zero.offload_param to cpu."
        )
    asked = "fp16=True with zero.engine=deepspeed on the CPU"
    yield from fp16_on_cpu(precision, on_cpu=True, asked=asked, fix="Set bf16=True, or neither.")


def _differences(asked: Mapping[str, Any], runs: Mapping[str, Any]) -> Iterator[str]:
    found = dict(leaves(runs))
    for path, value in leaves(asked):
        if value != "auto" and found.get(path) != value:
            yield (
                f"{path}={value} was asked for, but the DeepSpeed config of this run has {found.get(path)!r}: another one was "
                "made first. Give the settings in one place: the launcher's file, or HFParallelCallback made before "
                "TrainingArguments."
            )


def num_parameters(trainer: Trainer) -> int:
    """Parameters of the whole model, also if DeepSpeed has shared it out already."""
    parameters: list[Any] = [] if trainer.model is None else list(trainer.model.parameters())
    return sum(int(getattr(one, "ds_numel", one.numel())) for one in parameters)


def check_engine(trainer: Trainer, config: HFParallelConfig) -> str:
    """Check that DeepSpeed trains the prepared model, and describe in a line how.

    Raises:
        ConfigError: The engine that runs is not the one that was asked for.
    """
    engine: Any = trainer.model_wrapped
    if type(engine).__name__ != "DeepSpeedEngine":
        raise ConfigError(
            f"zero.engine=deepspeed, but the model that trains is a {type(engine).__name__}: DeepSpeed is not in effect. Do not "
            "wrap or prepare the model before Trainer.train()."
        )
    if (
        trainer.accelerator.deepspeed_engine_wrapped is None
    ):  # the Trainer takes the engine of an evaluation for its own
        raise ConfigError(
            f"zero.stage={config.zero.stage} with evaluate() or predict() before train(): the stock Trainer then trains with an "
            "engine that has no optimizer. Set eval_on_start=True instead, or evaluate with a Trainer of its own."
        )
    zero, args = config.zero, trainer.args
    wanted = {
        "zero.stage": (zero.stage, engine.zero_optimization_stage()),
        "zero.offload_optimizer": (zero.offload_optimizer, _device(engine.zero_offload_optimizer())),
        "zero.offload_param": (zero.offload_param, _device(engine.zero_offload_param())),
        "gradient_accumulation_steps": (args.gradient_accumulation_steps, engine.gradient_accumulation_steps()),
        "max_grad_norm": (float(args.max_grad_norm or 0), float(engine.gradient_clipping())),
    }
    problems = [
        f"{name}={asked} was asked for, but DeepSpeed runs with {runs}. Report this with the versions of deepspeed and accelerate."
        for name, (asked, runs) in wanted.items()
        if asked != runs
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    where = "" if zero.offload_optimizer == "none" else f" on {zero.offload_optimizer}"
    parameters = "" if zero.offload_param == "none" else f", parameters on {zero.offload_param}"
    missing = missing_compilers()
    why = f" ({' and '.join(missing)} not found, so nothing of DeepSpeed's is compiled)" if missing else ""
    return f"DeepSpeed ZeRO-{zero.stage}: {type(inner).__module__}.{type(inner).__name__}{where}{parameters}{why}"


def _device(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))
