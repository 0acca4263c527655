"""Every rule about a config file has its message, all problems come at once, and each names its line."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from typer.testing import CliRunner, Result

from hf_parallel.cli.main import app
from hf_parallel.deepspeed.keys import TOP, zero_keys
from hf_parallel.deepspeed.rules import batch_problems, section_keys
from hf_parallel.dry_run import check_file as check_file_module
from hf_parallel.dry_run.check_file import Checked, check_file, key_lines
from hf_parallel.dry_run.fit import layout_of_file
from hf_parallel.machine.facts import Gpu, Machine, stale_locks
from hf_parallel.settings.accelerate_keys import file_keys, launch_keys
from hf_parallel.settings.recipes import find_recipe, list_recipes


BASE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 4}
CPU = Machine((), 64 * 10**9)
AMPERE = Machine((Gpu("RTX 3090", 25 * 10**9, (8, 6)),) * 2, 128 * 10**9)
TURING = Machine((Gpu("T4", 16 * 10**9, (7, 5)),), 64 * 10**9)


def check(tmp_path: Path, content: Mapping[str, Any] | str, machine: Machine = CPU) -> Checked:
    path = tmp_path / "mine.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(dict(content)))
    return check_file(path, machine)


def with_ours(section: Mapping[str, Any] | None = None, **accelerate: Any) -> dict[str, Any]:
    return BASE | {"parallelism_config": {"hf_parallel": dict(section or {})}} | accelerate


def deepspeed(tmp_path: Path, config: object, **accelerate: Any) -> dict[str, Any]:
    file = tmp_path / "ds.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config, indent=2))
    block = {"deepspeed_config_file": str(file)} | accelerate.pop("block", {})
    return with_ours(distributed_type="DEEPSPEED", deepspeed_config=block) | accelerate


def messages(checked: Checked, severity: str = "error") -> list[str]:
    return [finding.message for finding in checked.findings if finding.severity == severity]


def assert_only(found: list[str], pattern: str) -> None:
    matching = [text for text in found if re.search(pattern, text)]
    assert matching, found
    assert len(matching) == len(found), found


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_is_without_a_finding(name: str) -> None:
    for machine in (TURING,) if name == "qlora_2xt4" else (CPU, AMPERE):  # fp16 is for GPUs without bf16
        assert check_file(find_recipe(name), machine).findings == ()


@pytest.mark.parametrize(
    ("accelerate", "message"),
    [
        ({"num_proceses": 4}, r"^num_proceses: unknown key, which accelerate refuses\. Did you mean num_processes\?"),
        ({"qqq": 4}, r"^qqq: unknown key.*Remove it\."),
        ({"distributed_type": "MULTI_CPU"}, r"^distributed_type='MULTI_CPU'.*ONE process.*use_cpu: true"),
        (
            {"num_processes": "4"},
            r"^num_processes='4': expected an integer\. Set num_processes to 4, a number without",
        ),
        ({"num_processes": 0}, r"^num_processes=0: expected an integer of 1 or more"),
        (
            {"num_processes": 4, "num_machines": 3, "main_process_ip": "a"},
            r"^num_processes=4 with num_machines=3: .*to 3 or 6\.",
        ),
        ({"mixed_precision": False}, r"^mixed_precision=false: YAML reads the bare word no as false.*'no', in quotes"),
        ({"mixed_precision": "half"}, r"^mixed_precision='half': expected one of no, fp16, bf16, fp8"),
        ({"deepspeed_confg": {"zero_stage": 2}}, r"^deepspeed_confg: unknown key.*Did you mean deepspeed_config\?"),
        ({"mixed_precision": "fp16"}, r"^mixed_precision='fp16' on a machine without a GPU: .*to bf16 or 'no'"),
        ({"mixed_precision": "fp16", "use_cpu": True}, r"^mixed_precision='fp16' with use_cpu=true.*to bf16 or 'no'"),
        (
            {"deepspeed_config": {"zero_stage": 2}},
            r"^deepspeed_config with distributed_type='MULTI_GPU' has no effect",
        ),
        ({"fsdp_config": {"fsdp_version": 2}}, r"^fsdp_config with .* has no effect: FSDP reads it"),
        ({"megatron_lm_config": {"a": 2}}, r"^megatron_lm_config with .* has no effect"),
    ],
)
def test_a_mistake_around_our_section_is_named(accelerate: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert_only(messages(check(tmp_path, with_ours() | accelerate)), message)


def test_a_file_without_a_type_or_our_section_is_named(tmp_path: Path) -> None:
    content = with_ours()
    del content["distributed_type"]
    assert_only(messages(check(tmp_path, content)), r"^distributed_type: accelerate refuses a file without it\. Set")
    checked = check(tmp_path, BASE)
    assert messages(checked) == []
    assert_only(messages(checked, "warning"), r"^parallelism_config\.hf_parallel: there is no such section.*Add one")


@pytest.mark.parametrize(
    "ours", [{"pp_size": 2}, {"tp_size": 2}, {"zero": {"stage": 2}}, {"gradient_accumulation_steps": 8}]
)
def test_what_deepspeed_would_ignore_is_refused_beside_it(ours: dict[str, Any], tmp_path: Path) -> None:
    content = with_ours(ours, distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 2})
    assert_only(
        messages(check(tmp_path, content, AMPERE)),
        r"^distributed_type='DEEPSPEED' with .*(pp_size=2|tp_size=2|stage=2|steps=8)",
    )


def test_accelerate_s_own_sizes_need_fsdp_2(tmp_path: Path) -> None:
    sizes = {"parallelism_config": {"parallelism_config_tp_size": 2}}
    assert_only(
        messages(check(tmp_path, BASE | sizes)), r"parallelism_config_tp_size=2 with .*need FSDP with fsdp_version 2"
    )
    fsdp = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    assert messages(check(tmp_path, BASE | sizes | fsdp)) == []
    beside = with_ours() | {"parallelism_config": {"hf_parallel": {}, "parallelism_config_tp_size": 2}}
    assert_only(messages(check(tmp_path, beside)), r"parallelism_config_tp_size=2 beside .*Remove it")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"pp_size": 3}, r"num_processes=4 is not a multiple of tp_size \* pp_size = 1 \* 3 = 3.*to 3 or 6"),
        ({"pp_size": 0}, r"^pp_size=0: expected pipeline stages"),
        ({"zero": {"stagge": 1}}, r"zero\.stagge: unknown key\. Did you mean stage\?"),
        ({"zeroo": {"stage": 1}}, r"^zeroo: unknown key\. Did you mean zero\?"),
        (
            {"activation_checkpoint": {"every": 1}},
            r"^activation_checkpoint: unknown key\. Did you mean activation_checkpointing\?",
        ),
        ({"zero": {"stage": 4}}, r"^zero\.stage=4: expected an integer from 0 to 3"),
        (
            {"zero": {"stage": 2, "offload_param": "cpu"}},
            r"^zero\.offload_param=cpu with zero\.stage=2 .*Set zero\.stage to 3",
        ),
        (
            {"zero": {"offload_optimizer": "cpu"}},
            r"^zero\.offload_optimizer='cpu' with zero\.stage=0 has no effect.*Set zero\.stage to 1",
        ),
        ({"zero": {"stage": 3, "offload_param": "cpu"}}, r"^zero\.offload_param=cpu without the other: .*both to cpu"),
        (
            {"zero": {"stage": 3, "offload_param": "nvme", "offload_optimizer": "nvme"}},
            r"^zero\.offload_(param|optimizer)='?nvme",
        ),
        ({"pp_size": 2, "zero": {"stage": 3}}, r"^zero\.stage=3 with pp_size=2: .*zero\.stage to 1, or pp_size to 1"),
        ({"gradient_accumulation_steps": 0}, r"^gradient_accumulation_steps=0: expected batches of an optimizer step"),
        ({"pp_size": 2, "pipeline": {"schedule": "csv", "schedule_file": "x.csv"}}, r"x\.csv: cannot be read"),
    ],
)
def test_our_own_rules_are_applied(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert_only(messages(check(tmp_path, with_ours(section))), message)


def test_numbers_in_the_spelling_of_yaml_are_numbers(tmp_path: Path) -> None:
    content = "distributed_type: MULTI_GPU\nnum_processes: 4\nparallelism_config:\n  hf_parallel: {pp_size: 2, pipeline: {num_microbatches: 1e1}}\n"
    assert yaml.safe_load("1e1") == "1e1"
    checked = check(tmp_path, content)
    assert checked.errors == []
    assert checked.config is not None
    assert checked.config.pipeline.num_microbatches == 10


def test_all_problems_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    text = """# a comment
distributed_type: MULTI_CPU
num_processes: 3
mixed_precision: no
use_cpuu: true
parallelism_config:
  hf_parallel:
    pp_size: 2
    pipeline:
      num_microbatches: -1
    zzzz: 1
"""
    found = {(f.line, f.message.split(":")[0].split("=")[0]) for f in check(tmp_path, text).errors}
    assert found == {
        (2, "distributed_type"),
        (4, "mixed_precision"),
        (5, "use_cpuu"),
        (10, "pipeline.num_microbatches"),
        (11, "zzzz"),
    }
    finding = check(tmp_path, text).errors[0]
    assert str(finding).startswith(f"{tmp_path / 'mine.yaml'}:{finding.line}: ")


def test_a_file_that_cannot_be_read_as_yaml_is_one_problem(tmp_path: Path) -> None:
    [finding] = check(tmp_path, "a: [1").findings
    assert finding.message.startswith("not valid YAML")
    [finding] = check(tmp_path, BASE | {"hf_parallel": {}}).findings
    assert "the settings stand in parallelism_config.hf_parallel and nowhere else" in finding.message


def test_lines_of_nested_keys_and_of_json() -> None:
    assert key_lines("a:\n  b: {c: 1}\nd: 2\n") == {"a": 1, "a.b": 2, "a.b.c": 2, "d": 3}
    assert key_lines('{\n  "a": {\n    "b": 1\n  }\n}') == {"a": 2, "a.b": 3}
    assert key_lines("a: [") == {}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"zero_stge": 2}, r"deepspeed_config\.zero_stge: unknown key, which accelerate drops silently\. Did you mean zero_stage\?"),
        ({"overlap_comm": True}, r"deepspeed_config\.overlap_comm=True: accelerate drops it silently\. Write it into a DeepSpeed JSON"),
        ({"offload_param_nvme_path": "/nvme"}, r"offload_param_nvme_path='/nvme': accelerate drops it silently"),
        ({"zero_stage": 4}, r"deepspeed_config\.zero_stage=4: expected an integer from 0 to 3"),
        ({"zero_stage": 2, "offload_param_device": "cpu"}, r"offload_param_device=cpu with .*zero_stage=2: .*Set .*zero_stage to 3"),
        ({"offload_param_device": "cpu"}, r"offload_param_device=cpu with deepspeed_config\.zero_stage=2"),
        ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, r"offload_optimizer_device=cpu with .*zero_stage=0: .*to 1 or more"),
        ({"offload_optimizer_device": "gpu"}, r"offload_optimizer_device='gpu': expected one of none, cpu, nvme"),
        ({"zero_stage": 3, "offload_param_device": "nvme"}, r"offload_param_device=nvme: accelerate does not pass a path on"),
        ({"deepspeed_config_file": "/no/ds.json"}, r"deepspeed_config_file='/no/ds\.json': .*No such file.*Name a JSON file"),
    ],
)  # fmt: skip
def test_a_mistake_in_deepspeed_s_section_is_named(block: dict[str, Any], message: str, tmp_path: Path) -> None:
    checked = check(tmp_path, with_ours(distributed_type="DEEPSPEED", deepspeed_config=block), AMPERE)
    assert_only(messages(checked), message)
    assert all(finding.line for finding in checked.errors)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"gradient_accumulation_steps": 8}, r"gradient_accumulation_steps=8: training ends at the start unless.*Set it to 'auto'"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping=0\.5: .*max_grad_norm"),
        ({"zero3_init_flag": True}, r"zero3_init_flag=true with zero_stage=2 has no effect"),
        ({"zero3_save_16bit_model": "true", "zero_stage": 1}, r"zero3_save_16bit_model=true with zero_stage=1"),
    ],
)  # fmt: skip
def test_what_may_fail_in_deepspeed_s_section_is_a_warning(
    block: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checked = check(tmp_path, with_ours(distributed_type="DEEPSPEED", deepspeed_config=block), AMPERE)
    assert checked.errors == []
    assert_only(messages(checked, "warning"), message)


GOOD: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu"}},
}


def zero(**settings: Any) -> dict[str, Any]:
    return GOOD | {"zero_optimization": {"stage": 3} | settings}


@pytest.mark.parametrize(
    ("config", "message", "line"),
    [
        ({**GOOD, "zero_optimisation": {}}, r"^zero_optimisation: unknown key, which DeepSpeed ignores silently\. Did you mean zero_optimization\?", True),
        ({**GOOD, "amp": {}}, r"^amp: DeepSpeed 0\.19\.8 has removed it", True),
        ({"fp16": {"enabled": False}}, r"^zero_optimization: accelerate refuses a DeepSpeed file without", True),
        (zero(reduce_bucket="auto"), r"^zero_optimization\.reduce_bucket: unknown key, which .* refuses\. Did you mean reduce_bucket_size\?", True),
        (zero(sub_group_size="1e9"), r"^zero_optimization\.sub_group_size='1e9': DeepSpeed refuses numbers in quotes\. Write 1000000000\.", True),
        (zero(stage=5), r"^zero_optimization\.stage=5: expected an integer from 0 to 3", True),
        (zero(stage=2, offload_param={"device": "cpu"}), r"^zero_optimization\.offload_param\.device=cpu with zero_optimization\.stage=2", True),
        (zero(stage=0, offload_optimizer={"device": "cpu"}), r"^zero_optimization\.offload_optimizer\.device=cpu with .*stage=0", True),
        (zero(offload_optimizer={"device": "cpu", "pin": True}), r"offload_optimizer\.pin: unknown key.*", True),
        (zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), r"offload_optimizer\.ratio=0\.5 with .*stage=2", True),
        (zero(offload_param={"device": "nvme"}), r"offload_param\.nvme_path=None: expected the absolute path", True),
        (zero(offload_param={"device": "nvme", "nvme_path": "nvme"}), r"offload_param\.nvme_path='nvme': expected the absolute", True),
        (zero(offload_param={"device": "nvme", "nvme_path": "/no/nvme"}), r"nvme_path='/no/nvme': this folder does not exist", True),
        ({**GOOD, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, r"^fp16\.enabled=true with bf16\.enabled=true", True),
        ({**GOOD, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
         r"^train_batch_size=64: 4 rows \* 2 accumulated \* 4 copies of the model \(4 processes / tp 1 / pp 1\) = 32\. Set it to 32", True),
        ({**GOOD, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
          "tensor_parallel": {"autotp_size": 2}}, r"^train_batch_size=32: .*2 copies of the model \(4 processes / tp 2", True),
    ],
)  # fmt: skip
def test_a_mistake_in_a_deepspeed_file_is_named(
    config: dict[str, Any], message: str, line: bool, tmp_path: Path
) -> None:
    checked = check(tmp_path, deepspeed(tmp_path, config), AMPERE)
    assert_only(messages(checked), message)
    for finding in checked.errors:
        assert finding.file == tmp_path / "ds.json"
        assert (finding.line is not None) is line


def test_a_good_deepspeed_file_is_without_a_finding(tmp_path: Path) -> None:
    assert check(tmp_path, deepspeed(tmp_path, GOOD), AMPERE).findings == ()
    nvme = zero(offload_param={"device": "nvme", "nvme_path": str(tmp_path)}) | {"aio": {}}
    assert check(tmp_path, deepspeed(tmp_path, nvme), AMPERE).errors == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (zero(sub_group_size="auto", reduce_bucket_size=1), r"^zero_optimization\.sub_group_size='auto': the Trainer does not fill this"),
        (zero(cpu_offload=True, reduce_bucket_size=1), r"^zero_optimization\.cpu_offload: deprecated"),
        (zero(reduce_bucket_size="auto", offload_param={"device": "nvme", "nvme_path": "/tmp"}), r"^aio: NVMe offload without"),
        (zero(), r"^zero_optimization\.reduce_bucket_size=5e\+08: 1\.0 GB in 16 bit.*GPU of 25 GB\. Set it to"),
    ],
)  # fmt: skip
def test_what_may_fail_in_a_deepspeed_file_is_a_warning(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    checked = check(tmp_path, deepspeed(tmp_path, config), AMPERE)
    assert checked.errors == []
    assert_only(messages(checked, "warning"), message)


def test_settings_in_both_places_are_refused(tmp_path: Path) -> None:
    both = deepspeed(tmp_path, GOOD, block={"zero_stage": 3}, mixed_precision="bf16")
    found = messages(check(tmp_path, both, AMPERE))
    assert re.match(
        r"deepspeed_config\.zero_stage beside .*\(zero_stage\): accelerate refuses settings in both", found[0]
    )
    assert re.match(r"mixed_precision='bf16' beside deepspeed_config\.deepspeed_config_file", found[1])


def test_a_deepspeed_file_that_is_no_json_mapping_is_named(tmp_path: Path) -> None:
    assert_only(messages(check(tmp_path, deepspeed(tmp_path, "{"), AMPERE)), r"deepspeed_config_file=.*Expecting")
    assert_only(messages(check(tmp_path, deepspeed(tmp_path, []), AMPERE)), r"expected a mapping")


def test_fp16_without_a_gpu_is_refused_in_a_deepspeed_file(tmp_path: Path) -> None:
    content = deepspeed(tmp_path, GOOD | {"fp16": {"enabled": True}, "bf16": {"enabled": False}})
    checked = check(tmp_path, content, CPU)
    assert_only(messages(checked), r"^fp16\.enabled=true without a GPU: .*bf16\.enabled to true")
    assert_only(messages(checked, "warning"), r"ddp_backend='gloo'")
    assert messages(check(tmp_path, content, AMPERE)) == []


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"fsdp_shard_strategy": 1}, r"fsdp_config\.fsdp_shard_strategy: unknown key.*Did you mean fsdp_sharding_strategy\?"),
        ({"fsdp_version": 3}, r"fsdp_config\.fsdp_version=3: expected 1 or 2"),
        ({"fsdp_version": 2, "fsdp_sharding_strategy": "FULL_SHARD"}, r"fsdp_sharding_strategy with fsdp_version=2 has no effect"),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}, r"reshard_after_forward='FULL_SHARD' with fsdp_version=2"),
        ({"fsdp_activation_checkpointing_offload": True}, r"checkpointing_offload=true needs fsdp_activation_checkpointing=true"),
    ],
)  # fmt: skip
def test_a_mistake_in_fsdp_s_section_is_named(block: dict[str, Any], message: str, tmp_path: Path) -> None:
    checked = check(tmp_path, with_ours(distributed_type="FSDP", fsdp_config=block), AMPERE)
    assert_only(messages(checked), message)
    assert all(finding.line for finding in checked.errors)


def test_fsdp_on_a_cpu_is_refused_and_its_keys_may_lack_the_prefix(tmp_path: Path) -> None:
    content = with_ours(distributed_type="FSDP", fsdp_config={"version": 2}, use_cpu=True)
    assert_only(messages(check(tmp_path, content)), r"distributed_type='FSDP' with use_cpu=true: .*plain DDP")


def test_rules_about_the_machine(tmp_path: Path) -> None:
    bf16, fp16 = with_ours(mixed_precision="bf16"), with_ours(mixed_precision="fp16")
    assert_only(
        messages(check(tmp_path, bf16, TURING)), r"mixed_precision='bf16': T4 has compute capability 7\.5.*to fp16"
    )
    assert messages(check(tmp_path, bf16 | {"use_cpu": True}, TURING)) == []
    assert check(tmp_path, bf16, AMPERE).findings == ()
    assert_only(messages(check(tmp_path, fp16, AMPERE), "warning"), r"mixed_precision='fp16': RTX 3090 has bf16")
    assert check(tmp_path, fp16, TURING).findings == ()


def test_the_lock_of_a_killed_build_is_refused_for_deepspeed(tmp_path: Path) -> None:
    for op, file in (("done", "done.so"), ("killed", "lock")):
        (tmp_path / "ext" / op).mkdir(parents=True)
        (tmp_path / "ext" / op / file).touch()
    locks = tuple(stale_locks(tmp_path / "ext"))
    assert locks == (tmp_path / "ext" / "killed" / "lock",)
    machine = dataclasses.replace(AMPERE, locks=locks)
    content = with_ours(distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 2})
    assert_only(
        messages(check(tmp_path, content, machine)), r"killed/lock is the lock of a build.*Remove it if no build"
    )
    assert messages(check(tmp_path, with_ours(), machine)) == []


def test_a_missing_number_of_processes_is_a_warning(tmp_path: Path) -> None:
    content = with_ours()
    del content["num_processes"]
    for changes in ({}, {"num_processes": -1}):
        checked = check(tmp_path, content | changes)
        assert checked.errors == []
        assert_only(messages(checked, "warning"), r"^num_processes: without it every launch needs --num_processes")


def test_the_global_batch_counts_model_copies_not_processes() -> None:
    assert [*batch_problems(8, 2, 2, 8, 2, 2)] == []
    [text] = batch_problems(32, 2, 2, 8, 2, 2)
    assert text.endswith("2 copies of the model (8 processes / tp 2 / pp 2) = 8. Set it to 8 or 'auto'.")


def test_the_keys_that_are_known_reach_accelerate_s_workers() -> None:
    from accelerate.utils import launch

    assert {"distributed_type", "num_processes", "fsdp_config", "parallelism_config", "fp16"} <= file_keys()
    fsdp = inspect.getsource(launch.prepare_multi_gpu_env)
    read = {name for pair in re.findall(r"args, ?\"(fsdp_\w+)|args\.(fsdp_\w+)", fsdp) for name in pair if name}
    assert launch_keys("fsdp_") | {"fsdp_ignored_modules"} == read
    deepspeed_env = inspect.getsource(launch.prepare_deepspeed_cmd_env)
    assert {key for key in section_keys() if f"args.{key}" in deepspeed_env} == section_keys()
    assert not re.search(r"nvme_path", deepspeed_env)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_itself_knows_no_other_keys() -> None:
    keys = zero_keys()
    assert keys is not None
    assert {"stage", "reduce_bucket_size", "stage3_prefetch_bucket_size"} <= keys.zero
    assert "cpu_offload" in keys.deprecated
    assert {name: "pin_memory" in known for name, known in keys.offload.items()} == {"optimizer": True, "param": True}
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS

    assert not TOP & set(_REMOVED_TOP_LEVEL_CONFIG_KEYS)


def test_without_deepspeed_its_own_keys_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_file_module, "zero_keys", lambda: None)
    checked = check(tmp_path, deepspeed(tmp_path, zero(reduce_bucket=5, reduce_bucket_size=1)), AMPERE)
    assert checked.errors == []
    assert_only(
        messages(checked, "warning"), r"^zero_optimization: its keys are not checked, because DeepSpeed is not"
    )


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["validate", *arguments])


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A config of 7e9 parameters; nothing of it is built but its names."""
    (tmp_path / "seven").mkdir()
    transformers.LlamaConfig().save_pretrained(tmp_path / "seven")
    return str(tmp_path / "seven")


def test_a_model_that_cannot_fit_is_refused_with_every_term(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ext"))
    path = tmp_path / "ds.yaml"
    block = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    path.write_text(
        yaml.safe_dump(with_ours(distributed_type="DEEPSPEED", deepspeed_config=block, mixed_precision="bf16"))
    )
    result = invoke(str(path), "--model", model, "--gpu-gb", "24", "--host-gb", "128")
    assert result.exit_code == 1
    assert (
        "optimizer state and fp32 gradients 107.8 + parameters and gradients 27.0 = 134.8 GB needed" in result.output
    )
    for term in ("gathered parameters", "activations", "logits and loss", "overhead (not measured)", "pinned blocks"):
        assert term in result.output
    enough = invoke(str(path), "--model", model, "--gpu-gb", "24", "--host-gb", "192", "--json")
    assert enough.exit_code == 0, enough.output
    facts = json.loads(enough.stdout)
    assert sum(facts["memory"]["host"].values()) == pytest.approx(134.8e9, rel=1e-3)
    assert any("pinned blocks" in finding["message"] for finding in facts["findings"])


def test_a_native_layout_is_judged_too(model: str, tmp_path: Path) -> None:
    path = tmp_path / "zero.yaml"
    path.write_text(yaml.safe_dump(with_ours({"pp_size": 2, "zero": {"stage": 1}}, mixed_precision="bf16")))
    refused = invoke(str(path), "--model", model, "--rows", "8", "--gpu-gb", "24", "--host-gb", "512")
    assert refused.exit_code == 1
    assert re.search(r"weights +13\.48 GB\n +optimizer state +13\.48 GB\n", refused.output), refused.output
    assert invoke(str(path), "--model", model, "--rows", "8", "--gpu-gb", "141", "--host-gb", "512").exit_code == 0
    assert "train_batch_size=99: 8 rows * 1 accumulated * 2 copies" in invoke(
        str(path), "--rows", "8", "--global-batch", "99"
    ).output  # fmt: skip


def test_too_little_ram_for_a_recipe_is_refused_before_it_is_launched(model: str) -> None:
    options = ("--model", model, "--dtype", "half", "--gpu-gb", "24")
    refused = invoke("budget_3090_7b", *options, "--host-gb", "64")
    assert refused.exit_code == 1
    assert (
        "RAM: parameters, gradients, optimizer state 107.8 = 107.8 GB needed for what is offloaded, 64.0 GB there"
        in refused.output
    )
    assert invoke("budget_3090_7b", *options, "--host-gb", "192").exit_code == 0


def test_adapters_are_counted_instead_of_the_model(model: str) -> None:
    options = ("--model", model, "--dtype", "half", "--gpu-gb", "24", "--host-gb", "64")
    assert "GPU memory: " in invoke("budget_3090_lora", *options).output
    assert invoke("budget_3090_lora", *options, "--adapters", "40000000").exit_code == 0
    assert invoke("budget_3090_lora", *options, "--adapters", "r16").exit_code == 0
    small = (*options[:-3], "12", *options[-2:], "--adapters", "40000000")
    assert invoke("budget_3090_lora", *small).exit_code == 1
    assert invoke("budget_3090_lora", *small, "--bits", "4.13").exit_code == 0
    refused = invoke("budget_3090_lora", *options, "--bits", "4.13")
    assert refused.exit_code == 2
    assert "without --adapters" in refused.output


def test_accumulation_is_the_file_s_number(model: str, tmp_path: Path) -> None:
    path = tmp_path / "eight.yaml"
    path.write_text(yaml.safe_dump(with_ours({"gradient_accumulation_steps": 8}, mixed_precision="bf16")))
    assert invoke(str(path), "--global-batch", "64", "--rows", "2").exit_code == 0
    assert "2 rows * 8 accumulated * 4 copies" in invoke(str(path), "--global-batch", "8", "--rows", "2").output
    other = invoke(str(path), "--accumulation", "4")
    assert other.exit_code == 1
    assert "gradient_accumulation_steps=8 in eight.yaml, but 4 batches of a step were asked for" in other.output


def test_processes_on_a_cpu_share_its_ram(model: str) -> None:
    refused = invoke("cpu_pp2", "--model", model, "--host-gb", "64")
    assert refused.exit_code == 1
    assert "RAM of each process: weights 13.5" in refused.output
    assert "32.0 GB there" in refused.output
    assert invoke("cpu_pp2", "--model", model, "--host-gb", "640").exit_code == 0


def test_a_wrong_model_or_dtype_is_refused(tmp_path: Path) -> None:
    result = invoke("cpu_pp2", "--model", str(tmp_path / "nothing"))
    assert result.exit_code == 1
    assert "no config found" in result.output
    assert invoke("cpu_pp2", "--dtype", "int8").exit_code == 2


def test_layouts_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    layout = layout_of_file(check(tmp_path, deepspeed(tmp_path, zero(overlap_comm=False)), AMPERE))
    assert (layout.engine, layout.stage, layout.precision, layout.buffers.overlap) == ("deepspeed", 3, "fp32", False)
    half = zero(reduce_bucket_size=1e6) | {"bf16": {"enabled": True}}
    layout = layout_of_file(check(tmp_path, deepspeed(tmp_path, half), AMPERE))
    assert (layout.precision, layout.buffers.reduce_bucket) == ("half", 1e6)
    block = {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True}
    layout = layout_of_file(
        check(tmp_path, with_ours(distributed_type="FSDP", fsdp_config=block, num_machines=2), AMPERE)
    )
    assert (layout.engine, layout.stage, layout.offload_param, layout.ranks_per_node) == ("fsdp2", 2, "cpu", 2)
    layout = layout_of_file(check(tmp_path, with_ours({"tp_size": 2}, mixed_precision="bf16")), None)
    assert (layout.engine, layout.tp_size, layout.precision) == ("native", 2, "autocast")
