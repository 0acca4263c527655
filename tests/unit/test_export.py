"""What is exported is what the engines read, and what they cannot express is refused by key."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_parallel.cli.engine_configs import to_accelerate, to_deepspeed, to_fsdp
from hf_parallel.cli.main import app
from hf_parallel.deepspeed.keys import zero_keys
from hf_parallel.deepspeed.rules import json_warnings
from hf_parallel.dry_run.check_file import check_file
from hf_parallel.errors import ConfigError
from hf_parallel.machine.facts import Machine
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import KEY, SECTION, list_recipes, load_recipe
from hf_parallel.settings.replica_sections import ZeroConfig


FILE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "num_processes": 4,
    "mixed_precision": "bf16",
}


def settings(zero: dict[str, Any] | None = None, **values: Any) -> HFParallelConfig:
    """Settings as the engines will see them, those included that the schema has but no engine of ours runs."""
    return HFParallelConfig(**values).model_copy(update={"zero": ZeroConfig().model_copy(update=zero or {})})


def test_deepspeed_gets_the_stage_and_auto_where_the_trainer_decides() -> None:
    found = to_deepspeed(settings({"stage": 2}), zero_keys())
    assert found["zero_optimization"] == {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"}
    assert {found[key] for key in found if "batch" in key or "gradient" in key} == {"auto"}
    assert found["bf16"] == found["fp16"] == {"enabled": "auto"}
    assert list(json_warnings(found, zero_keys(), 80e9)) == []


def test_deepspeed_gets_offload_and_buckets(tmp_path: Path) -> None:
    config = settings(
        {"stage": 3, "offload_optimizer": "cpu", "offload_param": "nvme", "nvme_path": str(tmp_path)},
        data_parallel={"bucket_cap_mb": 100, "overlap": False},
    )
    zero = to_deepspeed(config, zero_keys())["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert zero["offload_param"] == {"device": "nvme", "pin_memory": True, "nvme_path": str(tmp_path)}
    assert (zero["reduce_bucket_size"], zero["overlap_comm"]) == (50 * 2**20, False)
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_itself_takes_the_config(stage: int) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = to_deepspeed(settings({"stage": stage}), zero_keys())["zero_optimization"]
    assert DeepSpeedZeroConfig(**{key: value for key, value in zero.items() if value != "auto"}).stage == stage


def filled_in(config: dict[str, Any]) -> dict[str, Any]:
    """As the Trainer hands it over: with numbers of its own for 'auto'."""
    steps = config["gradient_accumulation_steps"]
    own = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1 if steps == "auto" else steps}
    zero = {key: value for key, value in config["zero_optimization"].items() if value != "auto"}
    chosen = {key: value for key, value in config.items() if value != "auto"}
    rows = (
        own["train_micro_batch_size_per_gpu"] * own["gradient_accumulation_steps"]
    )  # on the one process of this test
    precision = {"bf16": {"enabled": True}, "fp16": {"enabled": False}}
    return chosen | own | precision | {"train_batch_size": rows, "zero_optimization": zero}


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_is_what_deepspeed_takes_or_is_refused_with_the_reason(name: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = load_recipe(name)
    foreign = {
        "pp_size": config.pp_size > 1,
        "tp_size": config.tp_size > 1,
        "sp_size": config.sp_size > 1,
        "ep_size": config.ep_size > 1,
        "gradient_compression": config.gradient_compression.method != "none",
        "local_sgd": config.local_sgd.sync_every > 1,
    }
    reasons = [key for key, asked in foreign.items() if asked]
    if reasons:
        with pytest.raises(ConfigError) as refused:
            to_deepspeed(config, zero_keys())
        assert all(f"{key}" in str(refused.value) for key in reasons)
        assert "DeepSpeed cannot express it" in str(refused.value)
        return
    exported = to_deepspeed(config, zero_keys())
    taken = DeepSpeedConfig(filled_in(exported))
    assert taken.zero_config.stage == config.zero.stage
    assert taken.bfloat16_config.enabled
    if config.gradient_accumulation_steps != "auto":
        assert taken.gradient_accumulation_steps == config.gradient_accumulation_steps
    for part in ("optimizer", "param"):
        offload = getattr(taken.zero_config, f"offload_{part}")
        assert ("none" if offload is None else str(offload.device)) == getattr(config.zero, f"offload_{part}")


@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp_gets_arguments_that_fully_shard_has(stage: int) -> None:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    config = settings({"stage": stage, "offload_optimizer": "cpu", "offload_param": "cpu", "dp_shard_size": 2})
    found = to_fsdp(config, FILE)
    arguments = found["fully_shard"]
    assert set(arguments) <= set(inspect.signature(fully_shard).parameters)
    assert arguments["reshard_after_forward"] is (stage == 3)
    policy = MixedPrecisionPolicy(**{name: getattr(torch, dtype) for name, dtype in arguments["mp_policy"].items()})
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert CPUOffloadPolicy(**arguments["offload_policy"]).pin_memory
    assert found["mesh"] == {"dp_replicate": 2, "dp_shard": 2}


def test_fsdp_without_half_precision_or_offload_has_no_policies() -> None:
    found = to_fsdp(settings({"stage": 3}), FILE | {"mixed_precision": "no"})["fully_shard"]
    assert found["mp_policy"] == {"param_dtype": None, "reduce_dtype": None}
    assert found["offload_policy"] is None


@pytest.mark.parametrize(
    ("zero", "kind"),
    [({}, "MULTI_GPU"), ({"stage": 1}, "DEEPSPEED"), ({"stage": 2}, "DEEPSPEED"), ({"stage": 3}, "FSDP"),
     ({"stage": 2, "engine": "fsdp2"}, "FSDP"), ({"stage": 3, "engine": "deepspeed"}, "DEEPSPEED"),
     ({"stage": 3, "dp_shard_size": 2}, "FSDP")],
)  # fmt: skip
def test_accelerate_reads_what_is_written_for_it(zero: dict[str, Any], kind: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "out.yaml"
    path.write_text(yaml.safe_dump(to_accelerate(settings(zero), FILE, zero_keys())))
    assert load_config_from_file(str(path)).distributed_type.value == kind
    checked = check_file(path, Machine((), 10**9))
    assert checked.errors == []
    written = yaml.safe_load(path.read_text())
    assert KEY not in (written.get(SECTION) or {})
    if kind == "DEEPSPEED":
        assert written["deepspeed_config"]["zero_stage"] == zero["stage"]
    if "dp_shard_size" in zero:
        assert written[SECTION] == {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}


@pytest.mark.parametrize(
    ("values", "zero", "message"),
    [
        ({"pp_size": 2}, {}, r"^pp_size=2: DeepSpeed cannot express it\. Keep hf_parallel for pipelines"),
        ({"tp_size": 2}, {}, r"^tp_size=2: DeepSpeed cannot express it\. Keep hf_parallel for tensor"),
        ({"gradient_compression": {"method": "int8"}}, {}, r"^gradient_compression\.method='int8': DeepSpeed cannot express"),
        ({"local_sgd": {"sync_every": 8}}, {}, r"^local_sgd\.sync_every=8: DeepSpeed cannot"),
        ({}, {"stage": 1, "dp_shard_size": 2}, r"^zero\.dp_shard_size=2: DeepSpeed cannot"),
        ({}, {"stage": 1, "overlap_gather": True}, r"^zero\.overlap_gather=true: DeepSpeed cannot"),
        ({"monitor": {"hang_timeout_s": 5}}, {}, r"^monitor\.hang_timeout_s=5.0: DeepSpeed cannot"),
        ({}, {"stage": 3, "offload_param": "nvme"}, r"^zero_optimization\.offload_param\.nvme_path=None: expected the absolute"),
    ],
)  # fmt: skip
def test_what_deepspeed_cannot_express_is_refused(values: dict[str, Any], zero: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_deepspeed(settings(zero, **values), zero_keys())


@pytest.mark.parametrize(
    ("values", "zero", "message"),
    [
        ({}, {}, r"^zero\.stage=0: FSDP2 shares out parameters and gradients .*Set zero\.stage to 2 or 3"),
        ({}, {"stage": 1}, r"^zero\.stage=1: FSDP2 shares out"),
        ({}, {"stage": 3, "offload_optimizer": "cpu"}, r"^zero\.offload_optimizer=cpu with zero\.offload_param=none: .*all or nothing"),
        ({}, {"stage": 3, "offload_param": "nvme"}, r"^zero\.offload_param=nvme: FSDP2 offloads to host memory only"),
        ({"data_parallel": {"overlap": False}}, {"stage": 3}, r"^data_parallel\.overlap=false: FSDP2 cannot express it"),
    ],
)  # fmt: skip
def test_what_fsdp_cannot_express_is_refused(values: dict[str, Any], zero: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_fsdp(settings(zero, **values), FILE)


@pytest.mark.parametrize(
    ("values", "zero", "file", "message"),
    [
        ({"data_parallel": {"overlap": False}}, {"stage": 1}, {}, r"overlap=false: accelerate's DeepSpeed section cannot.*Use --to deepspeed"),
        ({}, {"stage": 3, "offload_param": "nvme"}, {}, r"offload_param_device=nvme: accelerate does not pass a path on"),
        ({"gradient_accumulation_steps": 8}, {"stage": 3}, {}, r"gradient_accumulation_steps=8: .*Give it to TrainingArguments"),
        ({"gradient_compression": {"method": "int8"}}, {}, {}, r"method='int8': plain data parallelism cannot express it"),
        ({}, {"stage": 3}, {"use_cpu": True}, r"'FSDP' with use_cpu=true: accelerate silently trains with plain DDP"),
        ({"activation_checkpointing": {"every": 2}}, {"stage": 3}, {}, r"every=2: accelerate's FSDP section recomputes"),
        ({"activation_checkpointing": {"every": 1, "offload": True}}, {"stage": 3}, {}, r"offload=true: accelerate's FSDP"),
        ({}, {"stage": 1, "offload_optimizer": "cpu", "pin_memory": False}, {}, r"zero\.pin_memory=false: accelerate's"),
        ({}, {"stage": 3}, {"num_processes": -1}, r"^num_processes: a mesh has a number of ranks"),
    ],
)  # fmt: skip
def test_what_accelerate_cannot_express_is_refused(
    values: dict[str, Any], zero: dict[str, Any], file: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        to_accelerate(settings(zero, **values), FILE | file, zero_keys())


def test_the_command_prints_what_can_be_read_back(tmp_path: Path) -> None:
    run = CliRunner().invoke
    printed = run(app, ["export", "cpu_dp2_zero1", "--to", "deepspeed"])
    assert json.loads(printed.stdout)["zero_optimization"]["stage"] == 1
    assert (
        yaml.safe_load(run(app, ["export", "cpu_dp2_zero1", "--to", "accelerate"]).stdout)["distributed_type"]
        == "DEEPSPEED"
    )
    half = tmp_path / "half.yaml"
    half.write_text(yaml.safe_dump(FILE | {SECTION: {KEY: {"zero": {"stage": 1}}}}))
    assert "give TrainingArguments(bf16=True)" in run(app, ["export", str(half), "--to", "deepspeed"]).stderr
    busy = tmp_path / "busy.yaml"
    trainers = {"gradient_accumulation_steps": 8, "activation_checkpointing": {"every": 2}}
    busy.write_text(yaml.safe_dump(FILE | {SECTION: {KEY: {"zero": {"stage": 2}, **trainers}}}))
    for target in ("deepspeed", "accelerate"):
        result = run(app, ["export", str(busy), "--to", target])
        found = yaml.safe_load(result.stdout)
        assert found.get("deepspeed_config", found)["gradient_accumulation_steps"] == 8
        assert "note: give TrainingArguments(gradient_accumulation_steps=8) as well" in result.stderr
        assert (
            "activation_checkpointing.every=2 is not in it: give TrainingArguments(activation_checkpointing"
            in result.stderr
        )
    refused = run(app, ["export", "cpu_pp2", "--to", "deepspeed"])
    assert refused.exit_code == 1
    assert "pp_size=2: DeepSpeed cannot express it" in refused.stderr
    assert run(app, ["export", "cpu_pp2", "--to", "megatron"]).exit_code == 2
