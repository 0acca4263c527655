"""The schema takes what is right, and names every thing that is wrong in one error."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from accelerate.utils import TorchDynamoPlugin

from hf_parallel import HFParallelCallback, HFParallelPlugin
from hf_parallel.errors import ConfigError, ScheduleError
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.pipeline_parallel.schedule.schedules import SCHEDULES
from hf_parallel.settings.config import HFParallelConfig, PipelineConfig
from hf_parallel.settings.replica_sections import GradientCompressionConfig
from hf_parallel.settings.schedule_names import ASYNCHRONOUS, STAGES_PER_RANK, ScheduleName
from hf_parallel.trainer.compiled import with_compiled_blocks


def parse(**values: Any) -> HFParallelConfig:
    return HFParallelConfig.from_mapping(values, source="test.yaml")


def test_neutral_values_of_absent_features_are_accepted_and_equal_the_defaults() -> None:
    config = parse(
        tp_size=1,
        pp_size=1,
        pipeline={"schedule": "1f1b", "num_microbatches": "auto", "split": "balanced", "transport": "auto"},
        tensor_parallel={"plan": "auto", "sequence_parallel": False, "vocab_parallel_loss": "auto"},
        zero={"stage": 0, "engine": "auto", "offload_optimizer": "none", "offload_param": "none", "nvme_path": None},
        activation_checkpointing={"every": None, "mode": "block"},
        gradient_compression={"method": "none"},
        local_sgd={"sync_every": 1},
        checkpoint={},
        monitor={"hang_timeout_s": 600, "batch_check_steps": 3},
    )
    assert config == HFParallelConfig()


@pytest.mark.parametrize("section", ["pipeline", "zero", "checkpoint", "monitor"])
def test_a_null_section_is_the_default(section: str) -> None:
    assert parse(**{section: None}) == HFParallelConfig()


def test_checkpoint_options_are_known_by_name() -> None:
    assert parse(checkpoint={"async_save": True}).checkpoint.async_save
    with pytest.raises(ConfigError, match=r"checkpoint\.async: unknown key\. Did you mean checkpoint\.async_save\?"):
        parse(checkpoint={"async": True})


def test_all_problems_are_reported_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tp_size=0, pp_szie=2, pipeline={"num_microbatches": -1, "split": [1, "x"]}, zero={"stage": 9})
    lines = str(caught.value).splitlines()
    assert lines[0] == "test.yaml:"
    paths = sorted(line.split("=")[0].split(":")[0] for line in lines[1:])
    assert paths == ["pipeline.num_microbatches", "pipeline.split", "pp_szie", "tp_size", "zero.stage"]
    assert "tp_size=0: expected ranks that share each layer, an integer of 1 or more. Set tp_size to 1." in lines


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"pp_szie": 2}, r"pp_szie: unknown key\. Did you mean pp_size\?"),
        ({"num_microbatch": 2}, r"Did you mean pipeline\.num_microbatches\?"),
        ({"schedule": "1f1b"}, r"schedule: unknown key here\. Move it to pipeline\.schedule\."),
        ({"pipeline": {"tp_size": 2}}, r"pipeline\.tp_size: unknown key here\. Move it to tp_size at the top level"),
        ({"pipeline.schedule": "1f1b"}, r"pipeline\.schedule: unknown key\. .* Write pipeline: {schedule: \.\.\.}\."),
        ({"pipeline": {"schedule.1f1b": None}}, r"pipeline\.schedule\.1f1b: unknown key\. Did you mean schedule\?"),
        ({"a.b": 1}, r"a\.b: unknown key\. Remove it\."),
        ({"pipeline": {"splits": "even"}}, r"pipeline\.splits: unknown key\. Did you mean split\?"),
        ({"zzzz": 1}, r"zzzz: unknown key\. Remove it\. Known keys: tp_size"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(values: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        parse(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"tp_size": True},
        {"tp_size": 1.5},
        {"pp_size": "two"},
        {"zero": {"stage": False}},
        {"pipeline": {"num_microbatches": True}},
        {"pipeline": {"split": []}},
        {"pipeline": 3},
        {"monitor": {"hang_timeout_s": math.nan}},
        {"monitor": {"hang_timeout_s": 0}},
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        parse(**values)


def test_numbers_that_yaml_reads_as_strings_are_numbers() -> None:
    config = parse(pp_size="2", pipeline={"num_microbatches": "1e1"}, monitor={"hang_timeout_s": "5e1"})
    assert (config.pp_size, config.pipeline.num_microbatches, config.monitor.hang_timeout_s) == (2, 10, 50.0)


@pytest.mark.parametrize(("given", "meant"), [(True, "on"), (False, "off"), ("auto", "auto"), ("full", "full")])
def test_on_and_off_survive_yaml(given: object, meant: str) -> None:
    assert parse(pipeline={"self_check": given}).pipeline.self_check == meant


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"schedule": "csv"}, r"pipeline\.schedule=csv needs pipeline\.schedule_file"),
        ({"schedule_file": "a.csv"}, r"schedule_file='a\.csv' with pipeline\.schedule=1f1b has no effect.*to csv"),
        ({"schedule": "1f1b", "stages_per_rank": 2}, r"stages_per_rank=2 with .*=1f1b: .* exactly 1 stages.*to 1 or"),
        ({"schedule": "zbv_zero_bubble", "stages_per_rank": 3}, r"exactly 2 stages on a rank"),
        ({"schedule": "interleaved_1f1b", "stages_per_rank": 1}, r"at least 2 stages on a rank"),
        ({"schedule": "csv", "schedule_file": "a", "stages_per_rank": 2}, r"the file says where each stage runs"),
        (
            {"schedule": "dualpipev", "split": [2, 2]},
            r"2 entries for pp_size=2 \* 2 stages per rank = 4.*Give 4 integers",
        ),
        ({"split": [0, 4]}, r"only the last stage may have no block"),
        ({"compile_blocks": "cudagraphs"}, r"expected backend of torch\.compile for each block"),
        ({"schedule": "zb1p"}, r"pipeline\.schedule='zb1p': expected the order .*zbv_zero_bubble"),
    ],
)
def test_schedule_settings_that_contradict_each_other_are_refused(pipeline: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(pp_size=2, pipeline=pipeline)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("0F0,0B0\n1F0\n", {}, r"own\.csv.*1B0 is missing"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", {}, r"own\.csv.*deadlocks: rank 0 stops at 0B0, waiting for 1B0"),
        ("0F0,0B0,0F1,0B1\n", {}, r"schedule_file='.*own\.csv' has 1 lines for pp_size=2.*Set pp_size to 1"),
        ("0F0,0X0\n1F0,1B0\n", {}, r"own\.csv.*line 1.*0X0"),
        (None, {}, r"own\.csv: cannot be read"),
        ("0F0,0B0\n1F0,1B0\n", {"split": [1, 1, 2]}, r"split=\[1, 1, 2\] has 3 entries.*has 2 stages. Give 2"),
        ("0F0,0I0,0W0\n1F0,1B0\n", {"compile_blocks": "inductor"}, r"compile_blocks=inductor .*cannot be deferred"),
    ],
)
def test_a_schedule_file_is_proven_before_anything_starts(
    text: str | None, settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.csv"
    if text is not None:
        file.write_text(text)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ScheduleError, match=message):
        HFParallelCallback({"pp_size": 2, "pipeline": {"schedule": "csv", "schedule_file": str(file), **settings}})
    with pytest.raises(ScheduleError, match=message):
        HFParallelPlugin({"pp_size": 2, "pipeline": {"schedule": "csv", "schedule_file": str(file), **settings}})


@pytest.mark.parametrize(
    "settings",
    [{}, {"pp_size": 2}, {"zero": {"stage": 3}}, {"activation_checkpointing": {"every": 2}}],
    ids=str,
)
def test_blocks_are_compiled_with_and_without_stages(settings: dict[str, Any]) -> None:
    assert parse(**settings, pipeline={"compile_blocks": "inductor"}).works_on_blocks


def test_blocks_that_torch_would_run_eager_are_refused() -> None:
    selective = {"every": 2, "mode": "selective"}
    with pytest.raises(
        ConfigError, match=r"with tp_size=2 is not available.*\n.*with activation_checkpointing\.mode=selective"
    ):
        parse(tp_size=2, activation_checkpointing=selective, pipeline={"compile_blocks": "inductor"})


@pytest.mark.parametrize(
    ("asked", "settings", "message"),
    [
        ({"backend": "cudagraphs"}, {}, r"backend=cudagraphs: blocks are compiled with inductor or aot_eager"),
        (
            {"backend": "inductor", "mode": "max-autotune"},
            {},
            r"mode=max-autotune has no effect on blocks.*Leave mode unset",
        ),
        (
            {"backend": "inductor"},
            {"compile_blocks": "aot_eager"},
            r"and pipeline\.compile_blocks=aot_eager\. Set one of them",
        ),
        ({"backend": "inductor"}, {"schedule": "zbv_zero_bubble"}, r"compile_blocks=inductor .*cannot be deferred"),
    ],
)
def test_torch_compile_that_blocks_cannot_follow_is_refused(
    asked: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    config = parse(pp_size=2, pipeline=settings)
    with pytest.raises((ConfigError, ScheduleError), match=message):
        with_compiled_blocks(config, ScheduleChoice(config.pipeline, 2), TorchDynamoPlugin(**asked))


def test_torch_compile_under_a_layout_that_compiles_nothing_is_refused_by_its_own_name() -> None:
    config = HFParallelConfig(tp_size=2)
    with pytest.raises(ConfigError, match=r"(?s)Leave torch_compile .* unset.*tp_size=2"):
        with_compiled_blocks(config, ScheduleChoice(config.pipeline, 1), TorchDynamoPlugin(backend="aot_eager"))


def test_what_a_launcher_says_of_each_compilation_is_no_demand_for_static_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = {"BACKEND": "INDUCTOR", "MODE": "default", "USE_FULLGRAPH": "False", "USE_DYNAMIC": "False"}
    for (
        name,
        value,
    ) in launched.items():  # as prepare_multi_gpu_env of accelerate writes them for dynamo_backend: inductor
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    config = HFParallelConfig(pp_size=2)
    compiled, _ = with_compiled_blocks(config, ScheduleChoice(config.pipeline, 2), TorchDynamoPlugin())
    assert compiled.pipeline.compile_blocks == "inductor"
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "True")
    with pytest.raises(ConfigError, match=r"dynamic=True has no effect"):
        with_compiled_blocks(config, ScheduleChoice(config.pipeline, 2), TorchDynamoPlugin())


def test_torch_compile_sets_what_the_settings_call_compile_blocks() -> None:
    config = parse(zero={"stage": 1})
    schedule = ScheduleChoice(config.pipeline, 1)
    assert with_compiled_blocks(config, schedule, TorchDynamoPlugin(backend="no")) == (config, schedule)
    compiled, _ = with_compiled_blocks(config, schedule, TorchDynamoPlugin(backend="inductor"))
    assert (compiled.zero.stage, compiled.pipeline.compile_blocks) == (1, "inductor")


def test_checkpointing_settings_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mode='alternate' without activation_checkpointing\.every has no effect"):
        parse(activation_checkpointing={"mode": "alternate"})
    with pytest.raises(
        ConfigError, match=r"offload=true without activation_checkpointing\.every .* or remove the offload"
    ):
        parse(activation_checkpointing={"offload": True})
    assert parse(activation_checkpointing={"every": "2", "mode": "alternate"}).activation_checkpointing.every == 2


def test_every_schedule_of_the_config_exists_and_needs_the_stages_that_the_config_says() -> None:
    assert {*STAGES_PER_RANK, *ASYNCHRONOUS, "csv"} == set(get_args(ScheduleName))
    for name, (stages, only) in STAGES_PER_RANK.items():
        family = SCHEDULES[name]
        assert (family.stages_per_rank_default, family.fixed_stages_per_rank) == (stages, stages if only else None)
        assert (
            len(parse(pp_size=3, pipeline={"schedule": name, "split": [1] * 3 * stages}).pipeline.split) == 3 * stages
        )
    assert set(SCHEDULES) == set(STAGES_PER_RANK)
    assert parse(pp_size=2, pipeline={"split": [4, 0]}).pipeline.split == (4, 0)


def test_a_split_needs_one_entry_a_stage() -> None:
    assert parse(pp_size=2, pipeline={"split": [1, 3]}).pipeline.split == (1, 3)
    with pytest.raises(ConfigError, match=r"has 3 entries for pp_size=2.*set pp_size to 3"):
        parse(pp_size=2, pipeline={"split": [1, 2, 3]})


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("num_microbatches", 4, "'auto'"),
        ("schedule", "gpipe", "'1f1b'"),
        ("split", "even", "'balanced'"),
        ("split", [4], "'balanced'"),
        ("transport", "host", "'auto'"),
        ("costs", "measured", "'analytic'"),
    ],
)
def test_a_pipeline_setting_without_a_pipeline_is_refused(key: str, value: object, neutral: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"pipeline\.{key}=.* with pp_size=1 has no effect.*pp_size to 2 or more, or .*{neutral}\."
    ):
        parse(tp_size=2, pipeline={key: value})


PLAN = {"model.layers.*.self_attn.*": "gather", "lm_head": "replicate"}


def test_a_plan_may_be_a_mapping_of_patterns() -> None:
    config = parse(tp_size=2, tensor_parallel={"plan": PLAN})
    assert config.tensor_parallel.plan == PLAN
    assert parse(**config.to_yaml_section()) == config
    assert config.fingerprint() != parse(tp_size=2).fingerprint()
    assert parse(tp_size=2).with_overrides(plan=PLAN) == config


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"lm_head": "gathr"},
            r"plan\['lm_head'\]='gathr': expected 'pair', 'gather', 'replicate'\. .*mean 'gather'\?",
        ),
        ({"a": "pair", "b": True}, r"plan\['b'\]=True: expected 'pair'"),
        ({1: "pair"}, r"plan\[1\]: patterns are strings"),
        ({}, r"plan=\{\}: an empty mapping has no effect\. Write 'auto'"),
        ("none", r"plan='none': expected 'auto' .* or a mapping: .*Set tensor_parallel\.plan to 'auto'\."),
    ],
)
def test_a_plan_that_means_nothing_is_refused_by_its_pattern(plan: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel\.{message}") as caught:
        parse(tp_size=2, tensor_parallel={"plan": plan})
    assert len(str(caught.value).splitlines()) == 2, "one line of its own"


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("plan", PLAN, "'auto'"),
        ("vocab_parallel_loss", True, "'auto'"),
        ("experts", "whole", "'split'"),
        ("on_fallback", "error", "'warn'"),
    ],
)
def test_a_setting_of_shared_layers_without_any_is_refused(key: str, value: object, neutral: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"tensor_parallel\.{key}=.* with tp_size=1 has no effect.*tp_size to 2 or more, or .*{neutral}\.",
    ):
        parse(pp_size=2, tensor_parallel={key: value})


def test_all_settings_without_a_pipeline_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(pipeline={"schedule": "gpipe", "num_microbatches": 4, "transport": "direct"})
    assert str(caught.value).count("has no effect") == 3


def test_the_constructor_raises_the_same_error_as_the_mapping() -> None:
    with pytest.raises(ConfigError, match=r"^pp_size=0: .*Set pp_size to 1\.$"):
        HFParallelConfig(pp_size=0)


def test_overrides_find_the_section_of_a_name() -> None:
    config = HFParallelConfig(pp_size=2, pipeline=PipelineConfig(schedule="gpipe", transport="host"))
    changed = config.with_overrides(
        tp_size=2, num_microbatches=8, pipeline={"schedule": "1f1b"}, **{"monitor.batch_check_steps": 0}
    )
    assert (changed.tp_size, changed.pp_size, changed.monitor.batch_check_steps) == (2, 2, 0)
    assert changed.pipeline == PipelineConfig(schedule="1f1b", num_microbatches=8, transport="host")
    assert config.tp_size == 1
    assert config.with_overrides(pipeline=PipelineConfig()).pipeline == PipelineConfig()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_microbatch": 2}, r"Did you mean pipeline\.num_microbatches"),
        ({"zero.stages": 0}, r"zero\.stages: unknown key\. Did you mean stage\?"),
        ({"engine": "deepspeed"}, r"(?s)overrides engine:.*zero\.engine='deepspeed' with zero\.stage=0 has no effect"),
    ],
)
def test_bad_overrides_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HFParallelConfig().with_overrides(**overrides)


def test_the_yaml_section_reads_back_as_the_same_config() -> None:
    config = parse(pp_size=2, pipeline={"split": [1, 3]}, tp_size=2)
    assert HFParallelConfig.from_mapping(config.to_yaml_section()) == config
    assert HFParallelConfig().to_yaml_section() == {"tp_size": 1, "pp_size": 1}


def test_the_fingerprint_depends_on_values_only() -> None:
    assert parse(pp_size=2).fingerprint() == parse(pp_size="2", pipeline=None).fingerprint()
    assert parse(pp_size=2).fingerprint() != parse(tp_size=2).fingerprint()


def test_dp_size_divides_the_world_or_names_the_nearest_valid_ones() -> None:
    config = HFParallelConfig(tp_size=2, pp_size=3)
    assert config.model_parallel_size == 6
    assert config.dp_size(12) == 2
    with pytest.raises(ConfigError, match=r"num_processes=8 is not a multiple of .* 2 \* 3 = 6.*to 6 or 12"):
        config.dp_size(8)
    with pytest.raises(ConfigError, match=r"num_processes=4 is below .* = 6.*to 6,"):
        config.dp_size(4)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        HFParallelConfig().pp_size = 2  # type: ignore[misc]


def test_the_json_schema_names_every_section() -> None:
    schema = HFParallelConfig.model_json_schema()
    assert set(schema["properties"]) == set(HFParallelConfig.model_fields)
    assert schema["additionalProperties"] is False


def test_importing_the_package_and_its_config_imports_no_torch() -> None:
    code = (
        "import sys, hf_parallel; assert 'pydantic' not in sys.modules; hf_parallel.HFParallelConfig; "
        "hf_parallel.list_recipes(); print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    env_path = [str(path) for path in sys.path if path]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {env_path!r}; {code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("method", "excluded"), [("fp16", ()), ("bf16", ()), ("int8", ("1d",)), ("topk", ("1d",))])
def test_vectors_are_sent_as_they_are_unless_the_method_casts_or_the_user_says_otherwise(
    method: str, excluded: tuple[str, ...]
) -> None:
    assert GradientCompressionConfig.model_validate({"method": method}).excluded == excluded
    given = GradientCompressionConfig.model_validate({"method": method, "exclude": ["1d", "*.head"]})
    assert given.excluded == ("1d", "*.head")
