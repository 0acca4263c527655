"""Settings of other engines are ours after `hf-parallel import`; what has no place is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from hf_parallel.cli.foreign_settings import from_accelerate, from_deepspeed
from hf_parallel.cli.main import app
from hf_parallel.dry_run.check_file import check_file
from hf_parallel.machine.facts import Machine
from hf_parallel.settings.recipes import read_recipe


def run(file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["import", str(file), "--output", str(file.parent / "ours.yaml"), *options])


def fsdp(**settings: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "bf16", "fsdp_config": settings}


@pytest.mark.parametrize(
    ("config", "section"),
    [
        ({"zero_optimization": {"stage": 2}}, {"zero": {"stage": 2}}),
        ({"zero_optimization": {"stage": "1"}}, {"zero": {"stage": 1}}),
        ({"gradient_accumulation_steps": 4}, {"zero": {"stage": 0}, "gradient_accumulation_steps": 4}),
        ({"gradient_accumulation_steps": "auto"}, {"zero": {"stage": 0}}),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/d"}}},
            {"zero": {"stage": 3, "offload_param": "nvme", "nvme_path": "/d"}},
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, {"zero": {"stage": 0}, "tp_size": 2}),
    ],
)
def test_deepspeed_s_settings_are_found(config: dict[str, Any], section: dict[str, Any]) -> None:
    assert from_deepspeed(config).section == section


@pytest.mark.parametrize(
    ("block", "section"),
    [
        ({"fsdp_version": 2}, {"zero": {"stage": 3}}),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, {"zero": {"stage": 2}}),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"zero": {"stage": 2}}),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, {"zero": {"stage": 0}}),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {"zero": {"stage": 3, "dp_shard_size": 4}}),
        (
            {"fsdp_version": 2, "fsdp_offload_params": "true", "fsdp_activation_checkpointing": True},
            {
                "zero": {"stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"},
                "activation_checkpointing": {"every": 1},
            },
        ),
    ],
)
def test_fsdp_s_settings_are_found(block: dict[str, Any], section: dict[str, Any]) -> None:
    taken = from_accelerate(fsdp(**block))
    assert taken.section == section
    assert taken.accelerate == {"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16"}


def test_megatron_s_settings_are_found() -> None:
    block = {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2, "megatron_lm_num_micro_batches": 4}
    block |= {"megatron_lm_sequence_parallelism": True, "megatron_lm_recompute_activations": True}
    found = from_accelerate(
        {"distributed_type": "MEGATRON_LM", "num_processes": 4, "megatron_lm_config": block}
    ).section
    assert found == {
        "tp_size": 2,
        "pp_size": 2,
        "pipeline": {"num_microbatches": 4},
        "tensor_parallel": {"sequence_parallel": True},
        "activation_checkpointing": {"every": 1, "mode": "selective"},
    }


def test_a_file_is_written_that_validates_and_the_rest_is_named(tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    config = {
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True},
    }
    source.write_text(json.dumps(config))
    result = run(source, "--num-processes", "4")
    assert result.exit_code == 0, result.output
    assert "gradient_clipping=1.0: give TrainingArguments(max_grad_norm)" in result.output
    assert "zero_optimization.overlap_comm=true: chosen by hf_parallel itself" in result.output
    ours, accelerate = read_recipe(tmp_path / "ours.yaml")
    assert (ours.zero.stage, accelerate["mixed_precision"], accelerate["num_processes"]) == (2, "bf16", 4)
    assert check_file(tmp_path / "ours.yaml", Machine((), 10**10)).findings == ()
    assert "is there already" in run(source).output


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"train_batch_size": 64}, r"train_batch_size=64: give TrainingArguments\(per_device_train_batch_size\), or set global_batch_size"),
        ({"zero_optimisation": {"stage": 2}}, r"zero_optimisation=.*: DeepSpeed does not know it either\. Did you mean zero_optimization\?"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, r"activation_checkpointing=.*activation_checkpointing\.every computes"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, r"mics_shard_size=8: set zero\.dp_shard_size"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, r"zero_quantized_weights=true: there is no such setting here"),
    ],
)  # fmt: skip
def test_what_has_no_place_is_told_with_where_it_is_decided(config: dict[str, Any], says: str) -> None:
    [note] = from_deepspeed(config).notes
    assert re.search(says, note), note


def test_clipping_is_the_trainer_s_in_every_file() -> None:
    for kind, block in (("DEEPSPEED", "deepspeed_config"), ("MEGATRON_LM", "megatron_lm_config")):
        [note] = from_accelerate({"distributed_type": kind, block: {"gradient_clipping": 1.0}}).notes
        assert note == f"{block}.gradient_clipping=1.0: give TrainingArguments(max_grad_norm)"


def test_there_are_processes_for_two_copies(tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text(json.dumps({"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}))
    result = run(source, "--use-cpu")
    assert result.exit_code == 0, result.output
    assert read_recipe(tmp_path / "ours.yaml")[1]["num_processes"] == 4


def test_what_only_deepspeed_offloads_stays_with_deepspeed(tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    assert run(source).exit_code == 0
    assert read_recipe(tmp_path / "ours.yaml")[0].zero.engine == "deepspeed"


def test_an_fsdp_file_is_written_anew(tmp_path: Path) -> None:
    source = tmp_path / "fsdp.yaml"
    source.write_text(yaml.safe_dump(fsdp(fsdp_version=2, fsdp_cpu_ram_efficient_loading=True)))
    result = run(source)
    assert "load with hf_parallel.from_pretrained" in result.output
    assert read_recipe(tmp_path / "ours.yaml")[0].zero.stage == 3


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.yaml", "distributed_type: XLA\n", "distributed_type='XLA': FSDP, DEEPSPEED, MEGATRON_LM and MULTI_GPU can be read"),
        ("a.yaml", "- 1\n", "expected a mapping, found list"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", '{"zero_optimization": 3}', "zero_optimization=3: expected a mapping"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "zero.stage=4: expected an integer from 0 to 3. Set zero.stage to 3"),
        (
            "a.yaml",
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n",
            "Import it instead",
        ),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused(name: str, content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    result = run(tmp_path / name)
    assert (result.exit_code, says in result.output) == (1, True), result.output
    assert not (tmp_path / "ours.yaml").exists()


def test_a_file_of_ours_is_not_imported(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        yaml.safe_dump({"distributed_type": "MULTI_GPU", "parallelism_config": {"hf_parallel": {"pp_size": 2}}})
    )
    result = run(file)
    assert result.exit_code == 1
    assert "parallelism_config.hf_parallel: the file has settings of hf_parallel already" in result.output
    assert not (tmp_path / "ours.yaml").exists()
