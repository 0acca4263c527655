"""`zero.engine: deepspeed`: what is emitted is what DeepSpeed takes, and what would have no effect is refused before a run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_parallel.deepspeed import ops, worker
from hf_parallel.deepspeed.emit import deepspeed_settings
from hf_parallel.deepspeed.rules import folder_problems
from hf_parallel.errors import ConfigError, UnsupportedError
from hf_parallel.memory.disk import disk_bytes, disk_shortages
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import check_accelerate


HERE = str(Path(__file__).parent)
NVME = {"stage": 3, "offload_optimizer": "nvme", "nvme_path": HERE}
PLACES = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 2, "offload_optimizer": "cpu", "pin_memory": False},
    {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    {**NVME, "offload_param": "nvme"},
]


def settings(zero: dict[str, Any], **others: Any) -> HFParallelConfig:
    return HFParallelConfig(zero={"engine": "deepspeed", **zero}, **others)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with compilers and no builds, whose environment and accelerate are put back."""
    from accelerate.state import PartialState

    for name in ("DS_ACCELERATOR", "ACCELERATE_TORCH_DEVICE", worker.USE_DEEPSPEED, worker.SETTINGS):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(PartialState, "_prepare_backend", PartialState._prepare_backend)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    monkeypatch.setattr(worker, "missing_compilers", list)
    monkeypatch.setattr(ops, "missing_compilers", list)
    return monkeypatch


@pytest.mark.parametrize(
    ("zero", "others", "message"),
    [
        ({"stage": 0}, {}, r"zero\.engine='deepspeed' with zero\.stage=0 has no effect: .*Set zero\.stage to 1, 2 or 3"),
        ({"stage": 1}, {"pp_size": 2}, r"zero\.engine=deepspeed with pp_size=2: .*Set pp_size to 1, or zero\.engine to auto"),
        ({"stage": 1}, {"tp_size": 4}, r"zero\.engine=deepspeed with tp_size=4: .*Set tp_size to 1, or zero\.engine to auto"),
        ({"stage": 1}, {"gradient_compression": {"method": "int8"}}, r"gradient_compression\.method=int8 with .*method to none"),
        ({"stage": 1}, {"local_sgd": {"sync_every": 4}}, r"local_sgd\.sync_every=4 with .*Set local_sgd\.sync_every to 1"),
        ({"stage": 1, "dp_shard_size": 2}, {}, r"zero\.dp_shard_size=2 with .*Set zero\.dp_shard_size to auto"),
        ({"stage": 1, "overlap_gather": True}, {}, r"zero\.overlap_gather=true with .*overlap_gather to false"),
        ({"stage": 1}, {"activation_checkpointing": {"every": 1}}, r"activation_checkpointing\.every=1 .*activation_checkpointing=True"),
        ({"stage": 1}, {"monitor": {"hang_timeout_s": 5}}, r"monitor\.hang_timeout_s=5\.0 .*ddp_timeout"),
        ({"stage": 2, "offload_param": "cpu"}, {}, r"zero\.offload_param=cpu with zero\.stage=2: .*Set zero\.stage to 3"),
        ({"stage": 2, "offload_optimizer": "nvme", "nvme_path": "/x"}, {}, r"offload_optimizer=nvme with zero\.stage=2: .*to cpu"),
        ({"stage": 3, "offload_param": "nvme"}, {}, r"zero\.nvme_path=null with zero\.offload_param=nvme: expected the absolute"),
        ({**NVME, "nvme_path": "scratch"}, {}, r"zero\.nvme_path='scratch' with zero\.offload_optimizer=nvme: expected the abs"),
        ({"stage": 3, "nvme_path": "/x"}, {}, r"zero\.nvme_path='/x' has no effect: nothing is offloaded to files"),
        ({"stage": 3, "pin_memory": False}, {}, r"zero\.pin_memory=false has no effect: nothing is offloaded"),
    ],
)  # fmt: skip
def test_what_deepspeed_does_not_read_is_refused(zero: dict[str, Any], others: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(zero, **others)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 3, "offload_param": "nvme", "offload_optimizer": "nvme"}, r"offload_param=nvme with zero\.engine=auto: only Dee"),
        ({"stage": 1, "nvme_path": "/x"}, r"zero\.nvme_path='/x' with zero\.engine=auto has no effect: .*engine to deepspeed"),
    ],
)  # fmt: skip
def test_what_only_deepspeed_reads_is_refused_elsewhere(zero: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HFParallelConfig(zero=zero)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"distributed_type": "NO"}, r"distributed_type='NO' with zero\.engine=deepspeed: .*Set distributed_type to MULTI_GPU"),
        ({"distributed_type": "MULTI_CPU"}, r"distributed_type='MULTI_CPU': accelerate starts ONE process"),
        ({"distributed_type": "FSDP"}, r"distributed_type='FSDP' with zero\.stage=2"),
        ({"deepspeed_config": {"zero_stage": 3}}, r"deepspeed_config\.zero_stage=3 beside zero\.engine=deepspeed: .*Remove"),
        ({"mixed_precision": "fp16", "use_cpu": True}, r"mixed_precision='fp16' with zero\.engine=deepspeed and use_cpu=true"),
    ],
)  # fmt: skip
def test_an_accelerate_file_that_cannot_start_deepspeed_is_refused(file: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_accelerate(settings({"stage": 2}), {"distributed_type": "MULTI_GPU", "num_processes": 2} | file)


@pytest.mark.parametrize("kind", ["MULTI_GPU", "DEEPSPEED"])
def test_both_launchers_may_start_deepspeed(kind: str) -> None:
    file = {"deepspeed_config": {"deepspeed_multinode_launcher": "standard"}, "mixed_precision": "fp16"}
    check_accelerate(settings({"stage": 2}), {"distributed_type": kind, "num_processes": 2} | file)


def test_deepspeed_of_another_hand_is_told_of_the_engine() -> None:
    with pytest.raises(ConfigError, match=r"'DEEPSPEED' with zero\.stage=2: .*or zero\.engine to deepspeed"):
        check_accelerate(HFParallelConfig(zero={"stage": 2}), {"distributed_type": "DEEPSPEED", "num_processes": 2})


@pytest.mark.parametrize("zero", PLACES, ids=str)
def test_deepspeed_and_accelerate_take_what_is_emitted(zero: dict[str, Any]) -> None:
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.runtime.config import DeepSpeedConfig

    emitted = deepspeed_settings(settings(zero))
    plugin = DeepSpeedPlugin(hf_ds_config=emitted)
    plugin.set_mixed_precision("bf16")
    filled = plugin.deepspeed_config | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    filled |= {"gradient_clipping": 0.5, "train_batch_size": 6}
    found = DeepSpeedConfig(filled)
    assert found.zero_config.stage == zero["stage"]
    assert (found.gradient_clipping, found.gradient_accumulation_steps) == (0.5, 3)
    for part in ("optimizer", "param"):
        offload = getattr(found.zero_config, f"offload_{part}")
        assert (offload.device if offload else "none") == zero.get(f"offload_{part}", "none")
        if offload:
            assert offload.pin_memory is zero.get("pin_memory", True)
        if offload and offload.device == "nvme":
            assert str(offload.nvme_path) == HERE
            assert found.aio_config["block_size"] == 2**20


def test_values_of_the_trainer_are_left_to_it() -> None:
    emitted = deepspeed_settings(settings({"stage": 3}))
    zero = emitted.pop("zero_optimization")
    autos = {key for key, value in emitted.items() if value in ("auto", {"enabled": "auto"})}
    assert autos == set(emitted)
    assert {"optimizer", "scheduler"}.isdisjoint(
        emitted
    )  # made by the Trainer: learning rate, betas and decay are its own
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True


def test_one_section_is_all_that_a_worker_reads(machine: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG_DS_FIELDS", "DEEPSPEED_ZERO_STAGE", "GRADIENT_CLIPPING", "USE_CPU", "USE_PARALLELISM_CONFIG"):
        machine.setenv(f"ACCELERATE_{name}", "1")
    worker.prepare_deepspeed(settings({"stage": 2}), on_cpu=False)
    left = {name for name in os.environ if name.startswith("ACCELERATE_") and os.environ[name]}
    assert left == {worker.USE_DEEPSPEED, worker.SETTINGS}
    assert json.loads(os.environ[worker.SETTINGS]) == deepspeed_settings(settings({"stage": 2}))


def test_cpu_processes_are_connected_by_gloo_without_the_users_help(machine: pytest.MonkeyPatch) -> None:
    from accelerate.state import PartialState

    machine.setenv("LOCAL_RANK", "0")
    for _ in range(2):
        worker.prepare_deepspeed(settings({"stage": 2}), on_cpu=True)
    state = object.__new__(PartialState)
    assert state._prepare_backend(False, False, None)[0] == "gloo"
    assert state._prepare_backend(False, False, "mpi")[0] == "mpi"
    assert state._prepare_backend(True, False, None)[1].value == "MULTI_CPU"
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_without_a_compiler_the_optimizer_is_torchs(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(worker, "missing_compilers", lambda: ["ninja"])
    config = settings({"stage": 2, "offload_optimizer": "cpu"})
    worker.prepare_deepspeed(config, on_cpu=False)
    assert json.loads(os.environ[worker.SETTINGS])["zero_force_ds_cpu_optimizer"] is False
    assert not worker.has_cpu_adam(config)


def test_a_build_that_makes_everyone_wait_is_announced_once(
    machine: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in ("0", "1"):
        machine.setenv("LOCAL_RANK", rank)
        worker.prepare_deepspeed(settings({"stage": 2, "offload_optimizer": "cpu"}), on_cpu=True)
    assert [record.getMessage().split(" will")[0] for record in caplog.records] == [
        "hf_parallel: deepspeed_shm_comm, cpu_adam"
    ]
    for name in ("deepspeed_shm_comm", "cpu_adam"):
        (tmp_path / "ops" / name).mkdir(parents=True)
        (tmp_path / "ops" / name / f"{name}.so").touch()
    assert ops.unbuilt(["deepspeed_shm_comm", "cpu_adam"]) == []


def test_a_missing_deepspeed_is_named(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(worker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"zero\.engine=deepspeed: DeepSpeed is not installed.*hf_parallel\[deepspeed\]"
    ):
        worker.refuse_machine(settings({"stage": 2}), on_cpu=True)


def test_the_lock_of_a_killed_build_is_an_error_and_not_a_hang(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lock = tmp_path / "ops" / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    worker.refuse_machine(settings({"stage": 2}), on_cpu=True)  # younger than the launch: a sibling builds
    os.utime(lock, (1e9, 1e9))
    with pytest.raises(ConfigError, match=rf"a build .* has left {lock} \(\d+ minutes old\).*rm {lock}"):
        worker.refuse_machine(settings({"stage": 2}), on_cpu=True)
    worker.refuse_machine(settings({"stage": 2}), on_cpu=False)  # GPUs do not need it
    with pytest.raises(ConfigError, match="rm "):
        ops.build(["deepspeed_shm_comm"])


def test_building_without_a_compiler_names_it(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(ops, "missing_compilers", lambda: ["g++", "ninja"])
    with pytest.raises(ConfigError, match=r"g\+\+, ninja: not found, and cpu_adam must be compiled"):
        ops.build(["cpu_adam"])
    assert ops.build([]) == {}


def test_each_run_builds_what_it_needs() -> None:
    assert ops.needed_ops(settings({"stage": 3}), on_cpu=False) == []
    assert ops.needed_ops(settings({"stage": 3}), on_cpu=True) == ["deepspeed_shm_comm"]
    assert ops.needed_ops(settings(NVME), on_cpu=False) == ["cpu_adam", "async_io"]


def test_the_command_builds_what_a_file_needs(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hf_parallel.cli import prebuild
    from hf_parallel.cli.main import app

    asked: list[str] = []
    machine.setattr(prebuild, "build", lambda names: {name: asked.append(name) or 1.0 for name in names})
    done = CliRunner().invoke(app, ["prebuild", "cpu_dp2_deepspeed", "--json"])
    assert json.loads(done.stdout) == {
        "folder": str(tmp_path / "ops"),
        "seconds": {"deepspeed_shm_comm": 1.0, "cpu_adam": 1.0},
    }
    assert asked == ["deepspeed_shm_comm", "cpu_adam"]
    refused = CliRunner().invoke(app, ["prebuild", "cpu_dp2"])
    assert refused.exit_code == 1
    assert "zero.engine=auto compiles nothing" in refused.stderr


def test_files_need_a_folder_and_libaio(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = settings({**NVME, "nvme_path": str(tmp_path / "gone")})
    with pytest.raises(ConfigError, match=r"zero\.nvme_path=.*gone'.*does not exist or cannot be written"):
        worker.refuse_machine(gone, on_cpu=True)
    assert list(folder_problems("zero.nvme_path", HERE)) == []
    machine.setattr(ops, "_builder", lambda name: SimpleNamespace(is_compatible=lambda verbose: False))
    with pytest.raises(ConfigError, match=r"offload_param=nvme: DeepSpeed's async_io op cannot be built.*libaio-dev"):
        worker.refuse_machine(settings(NVME), on_cpu=True)


def test_a_disk_that_is_too_small_is_refused_with_both_numbers() -> None:
    config = settings({**NVME, "offload_param": "nvme"})
    assert disk_bytes(1e9, config.zero) == 20e9
    assert disk_bytes(1e9, settings({"stage": 3, "offload_optimizer": "cpu"}).zero) == 0
    assert disk_shortages(1000, config.zero, 1) == []
    (line,) = disk_shortages(10**18, config.zero, 2)
    assert re.search(r"^zero\.nvme_path=.* write 10000000000\.0 GB for .* GB are free\. Set zero\.nvme_path", line)


def test_a_loop_of_ones_own_is_sent_to_accelerates_plugin() -> None:
    from hf_parallel import HFParallelPlugin

    with pytest.raises(UnsupportedError, match=r"zero\.engine=deepspeed in a loop of your own: .*DeepSpeedPlugin"):
        HFParallelPlugin(settings({"stage": 2}))


def trainer(kind: str = "DEEPSPEED", runs: dict[str, Any] | None = None, **arguments: Any) -> Any:
    from accelerate.utils import DistributedType

    given = {
        "deepspeed": None,
        "mixed_precision": "no",
        "device": SimpleNamespace(type="cpu"),
        "bf16": False,
        "fp16": False,
    }
    plugin = SimpleNamespace(deepspeed_config=runs)
    state = SimpleNamespace(deepspeed_plugin=plugin)
    accelerator = SimpleNamespace(distributed_type=DistributedType(kind), state=state)
    return SimpleNamespace(args=SimpleNamespace(**given | arguments), accelerator=accelerator)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"kind": "MULTI_CPU"}, r"zero\.engine=deepspeed, but accelerate runs MULTI_CPU: .*Import hf_parallel first"),
        ({"deepspeed": {}}, r"TrainingArguments\(deepspeed=\.\.\.\) beside zero\.engine=deepspeed: .*Remove the argument"),
        ({"mixed_precision": "fp16"}, r"fp16=True with zero\.engine=deepspeed on the CPU: .*Set bf16=True"),
        ({"runs": {"zero_optimization": {"stage": 3}}}, r"zero_optimization\.stage=2 was asked for, but .* has 3: .*one place"),
    ],
)  # fmt: skip
def test_a_trainer_that_runs_something_else_is_refused(made: dict[str, Any], message: str) -> None:
    from hf_parallel.deepspeed.trainer import refuse_other_runs

    with pytest.raises(ConfigError, match=message):
        refuse_other_runs(trainer(**made), settings({"stage": 2}))


def test_files_that_would_round_parameters_are_refused() -> None:
    from hf_parallel.deepspeed.trainer import refuse_other_runs

    with pytest.raises(ConfigError, match=r"offload_param=nvme in fp32 on the CPU: .* to bf16 .*Set bf16=True"):
        refuse_other_runs(trainer(runs={}), settings({**NVME, "offload_param": "nvme"}))


def test_a_model_that_deepspeed_does_not_hold_is_refused() -> None:
    from hf_parallel.deepspeed.trainer import check_engine

    with pytest.raises(ConfigError, match=r"the model that trains is a SimpleNamespace: DeepSpeed is not in effect"):
        check_engine(SimpleNamespace(model_wrapped=SimpleNamespace()), settings({"stage": 2}))  # type: ignore[arg-type]


def test_a_trainer_evaluates_the_model_itself_until_deepspeed_has_it() -> None:
    from hf_parallel.deepspeed.trainer import _evaluate_before_training

    seen: list[bool] = []
    trainer: Any = SimpleNamespace(is_deepspeed_enabled=True, deepspeed=None)
    trainer.evaluation_loop = lambda: seen.append(trainer.is_deepspeed_enabled)
    _evaluate_before_training(trainer)
    trainer.evaluation_loop()
    trainer.deepspeed = object()
    trainer.evaluation_loop()
    assert seen == [False, True]
    assert trainer.is_deepspeed_enabled
