"""What a restart takes for its own, how many batches a step has on another world, and keys that no earlier start has used."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hf_parallel import HFParallelConfig
from hf_parallel.checkpoints.agree import together
from hf_parallel.checkpoints.manifest import FileRecord, load_manifest, write_manifest
from hf_parallel.checkpoints.memory import make_memory_folder, memory_folder, remove_memory_folder
from hf_parallel.compat.private_rendezvous import NAMED, agreed_name, separate_starts
from hf_parallel.errors import CheckpointError, ConfigError
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.settings.accumulation import accumulation_for
from hf_parallel.settings.sections import CheckpointConfig
from hf_parallel.trainer.restarts import is_of_launch, refuse_memory


# -- rows of a step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replicas", "steps"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_fewer_replicas_accumulate_more_batches(replicas: int, steps: int) -> None:
    assert accumulation_for(32, 4, replicas, 1) == steps


@pytest.mark.parametrize("replicas", [3, 16])
def test_rows_that_cannot_be_shared_out_are_refused_with_numbers(replicas: int) -> None:
    match = (
        rf"global_batch_size=32 with per_device_train_batch_size=4 and {replicas} replicas: .* have {4 * replicas} rows, .*"
        r"1, 2, 4, 8 replicas fit"
    )
    with pytest.raises(ConfigError, match=match):
        accumulation_for(32, 4, replicas, 1)


def test_rows_that_fit_no_number_of_replicas_say_so() -> None:
    with pytest.raises(ConfigError, match=r"No number of replicas fits 5 rows.*set per_device_train_batch_size"):
        accumulation_for(32, 5, 2, 1)


def test_two_numbers_of_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=2\).*Leave it out of TrainingArguments"):
        accumulation_for(32, 4, 4, 2)
    with pytest.raises(ConfigError, match=r"global_batch_size=8 with gradient_accumulation_steps=2: .*Remove one"):
        HFParallelConfig(global_batch_size=8, gradient_accumulation_steps=2)


def test_engines_and_loops_that_count_batches_themselves_are_refused() -> None:
    from hf_parallel.trainer.loop_settings import refuse_in_loop

    with pytest.raises(ConfigError, match=r"global_batch_size=8 with zero\.engine=deepspeed has no effect"):
        HFParallelConfig(global_batch_size=8, zero={"engine": "deepspeed", "stage": 2})
    config = HFParallelConfig(global_batch_size=8, checkpoint={"memory_steps": 2})
    with pytest.raises(
        ConfigError, match=r"global_batch_size=8, checkpoint\.memory_steps=2 in a loop .*train with a Trainer"
    ):
        refuse_in_loop(config)
    with pytest.raises(ConfigError, match=r"checkpoint\.async_save=true in a loop .*train with a Trainer"):
        refuse_in_loop(HFParallelConfig(checkpoint={"async_save": True}))
    refuse_in_loop(HFParallelConfig())
    for monitor, key in (
        ({"report": True}, r"monitor\.report=true"),
        ({"trace_steps": [3]}, r"monitor\.trace_steps=\[3\]"),
        ({"slow_rank_factor": 1.5}, r"monitor\.slow_rank_factor=1\.5"),
    ):
        with pytest.raises(ConfigError, match=rf"{key} in a loop .*train with a Trainer"):
            refuse_in_loop(HFParallelConfig(monitor=monitor))


# -- whose checkpoint ---------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {"launches": ["here/1"], "writer": "here/7", "call": 0, "rows": 8}


@pytest.mark.parametrize(
    ("run", "launches", "call", "process", "is_own"),
    [
        (RUN, ["here/1"], 0, "here/8", True),
        (RUN, ["there/1", "here/1"], 0, "here/8", True),  # one machine of several was replaced
        (RUN, ["here/2"], 0, "here/8", False),  # an earlier run in the same folder
        (RUN, ["here/1"], 1, "here/8", False),  # another call of train()
        (RUN, ["here/1"], 0, "here/7", False),  # this very process: nothing was restarted
        (None, ["here/1"], 0, "here/8", False),
    ],
)
def test_a_restart_takes_up_what_its_own_launch_wrote(
    run: Any, launches: list[str], call: int, process: str, is_own: bool
) -> None:
    assert is_of_launch(run, launches, call, process) == is_own


@pytest.mark.parametrize("run", [{}, "x", {**RUN, "rows": -1}, {**RUN, "launches": [1]}, {**RUN, "more": 1}])
def test_a_manifest_that_says_something_odd_of_its_launch_is_refused(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = {"file": FileRecord(0, "0" * 64)}
    write_manifest(tmp_path, files, {"run": RUN})
    found = load_manifest(tmp_path)
    assert found is not None
    assert found.run == RUN
    write_manifest(tmp_path, files, {"run": run})
    with pytest.raises(CheckpointError, match=r"run=.* is not what a save says of its launch"):
        load_manifest(tmp_path)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_belongs_to_an_output_folder_and_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_parallel.checkpoints.memory.SHARED_MEMORY", tmp_path)
    folder = memory_folder(tmp_path / "out")
    assert folder == memory_folder(tmp_path / "x" / ".." / "out")
    assert folder != memory_folder(tmp_path / "other")
    make_memory_folder(folder)
    make_memory_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(CheckpointError, match=r"not a folder of this user alone.*memory_steps to 0"):
        make_memory_folder(folder)
    remove_memory_folder(folder)
    assert not folder.exists()


def test_memory_that_no_restart_could_read_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = CheckpointConfig(memory_steps=5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"memory_steps=5 on 2 machines.*to 0, and save to disk"):
        refuse_memory(settings, 4, only_model=False)
    with pytest.raises(ConfigError, match=r"memory_steps=5 with save_only_model=True"):
        refuse_memory(settings, 2, only_model=True)
    monkeypatch.setattr("hf_parallel.trainer.restarts.SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"memory_steps=5 needs .*none, which this machine does not have"):
        refuse_memory(settings, 2, only_model=False)
    refuse_memory(CheckpointConfig(), 4, only_model=True)


# -- starts ------------------------------------------------------------------------------------------------------------


def names_of_start(store: dist.Store, world_size: int) -> list[str]:
    """What the ranks of one start agree on; rank 0 comes last."""
    found = [""] * world_size

    def agree(rank: int) -> None:
        found[rank] = agreed_name(store, rank, world_size, timedelta(seconds=20))

    ranks = [threading.Thread(target=agree, args=(rank,)) for rank in range(world_size)]
    for rank in ranks[1:]:
        rank.start()
    ranks[0].start()
    for rank in ranks:
        rank.join()
    return found


def test_each_start_agrees_on_a_name_of_its_own_though_the_store_keeps_those_of_others() -> None:
    store = dist.HashStore()
    first, second = names_of_start(store, 3), names_of_start(store, 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
    store.set(NAMED, "of a start that died before all had answered")
    third = names_of_start(store, 3)
    assert len({*third, *first, *second}) == 3


def test_a_rank_that_is_left_alone_says_so() -> None:
    store = dist.HashStore()
    store.set(NAMED, "of a start that died")
    with pytest.raises(TimeoutError, match=r"rank 0 has not begun within 0\.3 s"):
        agreed_name(store, 1, 2, timedelta(seconds=0.3))


def test_without_restarts_nothing_is_changed() -> None:
    import importlib

    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    before = vars(rendezvous)["_create_c10d_store"]
    separate_starts({})
    separate_starts({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "0"})
    assert vars(rendezvous)["_create_c10d_store"] is before


def test_memory_that_is_full_names_the_setting_that_fills_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_parallel.checkpoints.memory.SHARED_MEMORY", tmp_path / "memory")
    mesh = Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5))
    for place, fix in (("memory", r"or set checkpoint\.memory_steps to 0,"), ("disk", "or lower save_total_limit,")):
        with pytest.raises(CheckpointError, match=fix), together(mesh, tmp_path / place / "checkpoint-2"):
            raise OSError(28, "No space left on device")
