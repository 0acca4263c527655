"""Whether the run that a file describes fits the memory of a machine: the file's settings as a layout, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_parallel.deepspeed.emit import deepspeed_settings
from hf_parallel.deepspeed.rules import batch_problems
from hf_parallel.dry_run.check_file import Checked
from hf_parallel.errors import ConfigError
from hf_parallel.memory.disk import disk_shortages
from hf_parallel.memory.estimate import estimate
from hf_parallel.memory.optimizers import ADAMW
from hf_parallel.memory.report import shortages, tight
from hf_parallel.memory.terms import Buffers, Device, Layout, Memory, ModelShape, Precision, Work, layout_of
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.values import number


@dataclass(frozen=True)
class Verdict:
    """Memory that a run needs, and where it is missing.

    Args:
        memory: Every term.
        errors: Terms that cannot fit, with every term.
        warnings: Terms that may not fit.
    """

    memory: Memory
    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def judge(
    checked: Checked,
    shape: ModelShape,
    work: Work,
    gpu_bytes: float | None,
    host_bytes: float,
    dtype: Precision | None,
    optim: str = ADAMW,
) -> Verdict:
    """Compare what a valid file needs with what there is.

    Args:
        checked: A file without errors.
        shape: Shape of the model.
        work: Rows and tokens.
        gpu_bytes: Memory of a GPU, None if there is none to compare with.
        host_bytes: RAM of a node.
        dtype: Dtype of the parameters; None is what the file's engine does with its mixed_precision.
        optim: The optimizer, a key of `OPTIMIZERS`.

    Raises:
        ConfigError: The file does not say how many processes there are.
    """
    layout = replace(layout_of_file(checked, dtype), optim=optim)
    on_cpu = checked.accelerate.get("use_cpu") is True
    zero, machines = (checked.config or HFParallelConfig()).zero, int(checked.accelerate.get("num_machines", 1))
    full = disk_shortages(shape.parameters, zero, machines)
    memory = estimate(shape, layout, work, on_gpu=not on_cpu)
    if not on_cpu:
        found = shortages(memory, gpu_bytes, host_bytes), tight(memory, gpu_bytes, host_bytes)
        return Verdict(memory, (*full, *found[0]), tuple(found[1]))
    share = host_bytes / min(layout.ranks_per_node, layout.num_processes)
    errors = [text.replace("GPU memory", "RAM of each process", 1) for text in shortages(memory, share, host_bytes)]
    return Verdict(memory, (*full, *errors), tuple(text for text in tight(memory, None, host_bytes)))


def accumulation_of(checked: Checked, given: int | None = None) -> int:
    """Batches of an optimizer step: the file's number, else `given`, else 1.

    Raises:
        ConfigError: The file's number is another than `given`.
    """
    wanted = (checked.config or HFParallelConfig()).gradient_accumulation_steps
    if wanted == "auto":
        return given or 1
    if given not in (None, wanted):
        raise ConfigError(
            f"gradient_accumulation_steps={wanted} in {checked.path.name}, but {given} batches of a step were asked for. Ask "
            f"for no number, or set gradient_accumulation_steps to {given} in the file."
        )
    return wanted


def batch_errors(checked: Checked, global_batch: int | None, work: Work) -> list[str]:
    """A global batch that rows, accumulation and model copies do not make."""
    config, processes = checked.config or HFParallelConfig(), _processes(checked)
    if global_batch is None:
        return []
    return [*batch_problems(global_batch, work.rows, work.accumulation, processes, config.tp_size, config.pp_size)]


def _processes(checked: Checked) -> int:
    value = checked.accelerate.get("num_processes")
    if not isinstance(value, int) or value < 1:
        raise ConfigError("num_processes: memory is counted for a number of ranks. Set num_processes in the file.")
    return value


def layout_of_file(checked: Checked, dtype: Precision | None = None) -> Layout:
    """The layout that a file asks for, run by our engines, DeepSpeed or FSDP."""
    accelerate, processes = checked.accelerate, _processes(checked)
    on_node = max(1, processes // int(accelerate.get("num_machines", 1)))
    half = str(accelerate.get("mixed_precision", "no")).lower() in ("bf16", "fp16")
    kind = accelerate.get("distributed_type")
    if kind == "DEEPSPEED" or _ours(checked) is not None:
        return _of_deepspeed(checked, processes, on_node, dtype or ("half" if half else "fp32"))
    if kind == "FSDP":
        return _of_fsdp(accelerate.get("fsdp_config") or {}, processes, on_node, dtype or ("half" if half else "fp32"))
    return layout_of(
        checked.config or HFParallelConfig(), processes, on_node, dtype or ("autocast" if half else "fp32")
    )


def _ours(checked: Checked) -> dict[str, Any] | None:
    """The DeepSpeed config that our section stands for, if DeepSpeed is its engine."""
    config = checked.config
    return deepspeed_settings(config) if config is not None and config.zero.engine == "deepspeed" else None


def _of_deepspeed(checked: Checked, processes: int, on_node: int, precision: Precision) -> Layout:
    block = checked.accelerate.get("deepspeed_config") or {}
    deepspeed = checked.deepspeed or _ours(checked)
    if deepspeed is None:
        stage, sizes = number(block.get("zero_stage", 2)), Buffers()
        devices = {part: block.get(f"offload_{part}_device", "none") for part in ("optimizer", "param")}
    else:
        zero = deepspeed["zero_optimization"]
        stage, sizes = number(zero.get("stage", 0)), _buffers(zero)
        devices = {part: (zero.get(f"offload_{part}") or {}).get("device", "none") for part in ("optimizer", "param")}
        enabled = {key: (deepspeed.get(key) or {}).get("enabled") for key in ("bf16", "fp16")}
        precision = "half" if True in enabled.values() else precision
    return Layout(
        processes,
        on_node,
        stage=int(str(stage)),
        engine="deepspeed",
        precision=precision,
        offload_optimizer=devices["optimizer"],
        offload_param=devices["param"],
        buffers=sizes,
    )


def _buffers(zero: Mapping[str, Any]) -> Buffers:
    """Sizes that are numbers; 'auto' ones are the model's hidden size squared, far below the defaults."""
    names = {
        "reduce_bucket": "reduce_bucket_size",
        "allgather_bucket": "allgather_bucket_size",
        "prefetch": "stage3_prefetch_bucket_size",
        "live": "stage3_max_live_parameters",
    }
    given = {name: zero[key] for name, key in names.items() if isinstance(zero.get(key), int | float)}
    small = {name: 5e7 for name, key in names.items() if zero.get(key) == "auto"}
    overlap = zero.get("overlap_comm")
    return Buffers(**given, **small, overlap=overlap if isinstance(overlap, bool) else None)


def _of_fsdp(block: Mapping[str, Any], processes: int, on_node: int, precision: Precision) -> Layout:
    given = {key.removeprefix("fsdp_"): str(value).lower() for key, value in block.items()}
    kept = given.get("reshard_after_forward") == "false" or given.get("sharding_strategy") in ("shard_grad_op", "2")
    device: Device = "cpu" if given.get("offload_params") == "true" else "none"
    return Layout(
        processes,
        on_node,
        stage=2 if kept else 3,
        engine="fsdp2",
        precision=precision,
        offload_optimizer=device,
        offload_param=device,
    )
