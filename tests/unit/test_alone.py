"""What settings do in one process: a table that says it of every setting, and what follows for the run.

If these fail, a setting is configured and not in effect in one process, silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from hf_parallel import HFParallelCallback
from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.one_process import IN_ONE_PROCESS, effect_of, in_one_process
from hf_parallel.settings.recipes import list_recipes, load_recipe
from hf_parallel.settings.values import Section


def settings_of(model: type[Section] = HFParallelConfig, before: str = "") -> Iterator[str]:
    """Dotted name of every setting."""
    for name, field in model.model_fields.items():
        if isinstance(field.default, Section):
            yield from settings_of(type(field.default), f"{before}{name}.")
        else:
            yield before + name


def sections_above(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]


SETTINGS = list(settings_of())


@pytest.mark.parametrize("path", SETTINGS)
def test_the_table_has_every_setting(path: str) -> None:
    assert effect_of(path)


def test_the_table_has_nothing_else() -> None:
    known = {*SETTINGS, *(section for path in SETTINGS for section in sections_above(path))}
    assert set(IN_ONE_PROCESS) <= known


def test_a_section_stands_in_it_only_where_all_its_settings_do_the_same() -> None:
    """Else a new setting of a section of which some act would pass for one without effect."""
    assert not [path for path in IN_ONE_PROCESS if any(section in IN_ONE_PROCESS for section in sections_above(path))]


@pytest.mark.parametrize("path", ["pipeline.later", "zero.later", "monitor.later", "later"])
def test_a_setting_without_entry_is_found(path: str) -> None:
    with pytest.raises(KeyError, match=path):
        effect_of(path)


OFFLOADS = {"offload_optimizer": "cpu", "stage": 1}
NAMES = {"method": "int8", "exclude": ("1d", "*.bias")}


@pytest.mark.parametrize(
    ("settings", "acting", "idle"),
    [
        ({}, [], []),
        (
            {"gradient_accumulation_steps": 2, "checkpoint": {"async_save": True}, "monitor": {"metrics": False}},
            [],
            [],
        ),
        (
            {"activation_checkpointing": {"every": 2, "mode": "selective"}},
            ["activation_checkpointing.every=2", "activation_checkpointing.mode=selective"],
            [],
        ),
        ({"zero": {"stage": 2, "overlap_gather": True}}, [], ["zero.stage=2", "zero.overlap_gather=true"]),
        (
            {"zero": {**OFFLOADS, "pin_memory": False}, "data_parallel": {"overlap": False, "bucket_cap_mb": 4.0}},
            [
                *("data_parallel.bucket_cap_mb=4.0", "data_parallel.overlap=false", "zero.stage=1"),
                *("zero.offload_optimizer=cpu", "zero.pin_memory=false"),
            ],
            [],
        ),
        ({"data_parallel": {"overlap": False}}, [], ["data_parallel.overlap=false"]),
        (
            {"local_sgd": {"sync_every": 4, "compression": NAMES}, "topology": {"nodes": 2}},
            [],
            [
                *("local_sgd.sync_every=4", "local_sgd.compression.method=int8"),
                *("local_sgd.compression.exclude=['1d', '*.bias']", "topology.nodes=2"),
            ],
        ),
        ({"layout": "auto"}, [], ["layout=auto"]),
        (
            {"monitor": {"trace_steps": [1, 3], "hang_timeout_s": 30.0}, "pipeline": {"compile_blocks": "inductor"}},
            ["pipeline.compile_blocks=inductor", "monitor.trace_steps=[1, 3]"],
            ["monitor.hang_timeout_s=30.0"],
        ),
    ],
)
def test_settings_are_sorted_by_what_they_do(settings: dict[str, object], acting: list[str], idle: list[str]) -> None:
    alone = in_one_process(HFParallelConfig(**settings))
    assert alone.acting == acting
    assert alone.idle == idle
    for text in acting:
        assert text in alone.words.partition("; without effect in one process: ")[0]
    for text in idle:
        assert text in alone.words.partition("; without effect in one process: ")[2]
    assert bool(alone.words) == bool(acting or idle)


def test_what_acts_is_kept_and_nothing_else() -> None:
    given = HFParallelConfig(
        zero={"stage": 1, "offload_optimizer": "cpu", "dp_shard_size": 1},
        data_parallel={"reduce_dtype": "bfloat16"},
        checkpoint={"memory_steps": 2},
        monitor={"report": True, "batch_check_steps": 0},
    )
    kept = in_one_process(given).config.model_dump(exclude_defaults=True)
    assert kept == {
        "zero": {"stage": 1, "offload_optimizer": "cpu"},
        "checkpoint": {"memory_steps": 2},
        "monitor": {"report": True},
    }


@pytest.mark.parametrize("name", list_recipes())
def test_what_a_recipe_keeps_is_valid(name: str) -> None:
    """On one rank of each axis, as one process runs it."""
    values = load_recipe(name).model_dump(exclude_defaults=True)
    sizes = dict.fromkeys(("tp_size", "pp_size", "ep_size", "sp_size"), 1)
    pipeline = {key: value for key, value in values.get("pipeline", {}).items() if key == "compile_blocks"}
    config = HFParallelConfig(**{**values, **sizes, "pipeline": pipeline, "tensor_parallel": {}})
    if config.zero.engine == "deepspeed" and config.zero.offloads:
        with pytest.raises(ConfigError, match=r"zero\.engine=deepspeed in one process"):
            in_one_process(config)
        return
    alone = in_one_process(config)
    again = in_one_process(alone.config)
    assert (again.config, again.acting, again.idle) == (alone.config, alone.acting, [])


def test_deepspeed_offloads_in_launched_processes_alone() -> None:
    config = HFParallelConfig(zero={"stage": 3, "engine": "deepspeed", "offload_param": "cpu"})
    with pytest.raises(
        ConfigError, match=r"zero\.offload_param=cpu with zero\.engine=deepspeed .*torchrun --nproc_per_node 1"
    ):
        in_one_process(config)


@pytest.mark.parametrize(
    ("checkpoint", "told"), [({"async_save": True}, "async_save=true"), ({"memory_steps": 3}, "memory_steps=3")]
)
def test_settings_of_checkpoints_that_stock_code_writes_are_refused(
    checkpoint: dict[str, object], told: str, tmp_path: Path
) -> None:
    """Of adapters other than LoRA a Trainer in one process writes stock checkpoints."""
    settings = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])

    def made(kind: PeftConfig, **parallel: object) -> Trainer:
        model = get_peft_model(tiny.llama(), kind)
        return Trainer(model, settings, train_dataset=tiny.rows(8), callbacks=[HFParallelCallback({}, **parallel)])

    rescaled = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    with pytest.raises(
        ConfigError, match=rf"checkpoint\.{told} would have no effect in one process: .*\(IA3\).*Leave"
    ):
        made(rescaled, checkpoint=checkpoint)
    assert made(rescaled, checkpoint={"auto_resume": False})
    assert made(LoraConfig(target_modules=["k_proj"]), checkpoint=checkpoint)
