"""Each rank reads its own part of a checkpoint, and training is then the same to the last bit.

If these fail, ranks load what they do not need, or train on other weights than the checkpoint's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from accelerate import Accelerator
from counted_calls import sizes_of_calls
from rank_runner import run_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_parallel import CheckpointError, HFParallelCallback, HFParallelPlugin, from_pretrained, sharded_loading
from hf_parallel.checkpoints.weights.gather import gather_tensors
from hf_parallel.checkpoints.weights.unread import RECORD, Unread
from hf_parallel.checkpoints.weights.write import plan_export, write_weights
from hf_parallel.errors import PlanError
from hf_parallel.ledger import Entry, Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}


def train(
    folder: str, out: Path, layout: dict[str, Any], *, unread: bool, checkpointed: bool = False, **options: Any
) -> tuple[Trainer, Unread | None]:
    torch.manual_seed(0)
    if unread:
        with sharded_loading({}, **layout):
            model = AutoModelForCausalLM.from_pretrained(folder, **options)
        assert any(p.is_meta for p in model.parameters())
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(out),
            per_device_train_batch_size=4,
            max_steps=2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
            gradient_checkpointing=checkpointed,
        ),
        train_dataset=tiny.rows(16),
        data_collator=tiny.collate,
        callbacks=[HFParallelCallback({}, **layout)],
    )
    record = vars(model).get(RECORD)
    trainer.train()
    return trainer, record


def compare_rank(
    rank: int, world_size: int, models: list[str], layout: dict[str, Any], options: dict[str, Any], run: str
) -> list[str]:
    found = []
    for name in models:
        losses = []
        for unread in (False, True):
            folder = Path(run) / name
            trainer, record = train(str(folder), folder / "out", layout, unread=unread, **options)
            state = trainer.accelerator.hf_parallel.engine.attachment
            parts = {**state.parameters, **state.buffers}
            trainer.accelerator.hf_parallel.watchdog.stop()
            if record is not None:
                found += counts(name, record, parts, state.ledger)
            losses.append(([entry.get("loss") for entry in trainer.state.log_history], parts))
        (plain, expected), (lazy, got) = losses
        if plain != lazy:
            found.append(f"{name}: losses {plain} and {lazy}")
        if expected.keys() != got.keys():
            found.append(f"{name}: {expected.keys() ^ got.keys()}")
        found += [
            f"{name}: {key}"
            for key in expected
            if expected[key].dtype != got[key].dtype or not torch.equal(expected[key], got[key])
        ]
    return found


def counts(name: str, record: Unread, parts: dict[str, torch.Tensor], ledger: Ledger) -> list[str]:
    """What is wrong with the numbers of elements filled and bytes read; `parts` are what the rank holds."""
    found = []
    held = sum(tensor.numel() for tensor in parts.values())
    if record.num_elements != held:
        found.append(f"{name}: {record.num_elements} elements filled, {held} held")
    if held >= 0.75 * sum(math.prod(entry.shape) for entry in ledger):
        found.append(f"{name}: holds {held}")
    # Converted tensors are read whole, and so are such short rows as a column of a tiny matrix has.
    exact = name != "mixtral" and not any(entry.spec for entry in ledger)
    if exact and record.num_bytes != 4 * held:
        found.append(f"{name}: {record.num_bytes} bytes read for {held} elements of 4 bytes")
    return found


def save(name: str, folder: Path, **options: Any) -> None:
    tiny.MODELS[name]().save_pretrained(folder / name, **options)


@pytest.mark.parametrize(
    ("layout", "models", "options"),
    [
        ({"pp_size": 2}, ["llama", "llama_tied"], {}),
        ({"tp_size": 2}, ["llama_tied", "mixtral"], {"dtype": torch.bfloat16}),
    ],
    ids=["pp2", "tp2"],
)
def test_training_equals_that_of_a_model_loaded_whole(
    layout: dict[str, Any], models: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    for index, name in enumerate(models):
        save(name, tmp_path, max_shard_size="20KB" if index == 0 else "1GB")
    for found in run_ranks(
        compare_rank, 2, models, layout, options, str(tmp_path), tmp_path=tmp_path, env=ENV, timeout=170
    ):
        assert found == []


def export_rank(rank: int, world_size: int, name: str, layout: dict[str, Any], run: str) -> list[str]:
    """Save a model on a mesh and in one process; names of files that differ."""
    folder = Path(run)
    with sharded_loading({}, **layout):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
    torch.manual_seed(0)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(str(folder / "out"), report_to=[], use_cpu=True),
        data_collator=tiny.collate,
        callbacks=[HFParallelCallback({}, **layout)],
    )
    trainer.save_model(str(folder / "saved"))
    with_shards = plan_export(model, trainer.accelerator.hf_parallel.engine.attachment.ledger, "30KB")
    attachment = trainer.accelerator.hf_parallel.engine.attachment
    held = {**attachment.parameters, **attachment.buffers}
    into = folder / "shards"
    into.mkdir(exist_ok=True)
    write_weights(with_shards, into, model, attachment.ledger, held, attachment.mesh, attachment.watchdog)
    trainer.accelerator.hf_parallel.watchdog.stop()
    if rank:
        return []
    whole = AutoModelForCausalLM.from_pretrained(folder / name)
    whole.config.use_cache = False  # as every Trainer sets it
    whole.save_pretrained(folder / "expected")
    whole.save_pretrained(folder / "expected_shards", max_shard_size="30KB")
    found = []
    for expected, saved in (("expected", "saved"), ("expected_shards", "shards")):
        for path in (folder / expected).iterdir():
            other = folder / saved / path.name
            if saved == "shards" and not path.name.startswith("model"):
                continue
            if not other.is_file() or other.read_bytes() != path.read_bytes():
                found.append(f"{saved}/{path.name}")
        extra = {p.name for p in (folder / saved).iterdir()} - {p.name for p in (folder / expected).iterdir()}
        found += sorted(extra - {"training_args.json"})
    return found


@pytest.mark.parametrize(
    ("name", "layout"), [("mixtral", {"tp_size": 2}), ("gpt2", {"pp_size": 2})], ids=["tp2", "pp2"]
)
def test_a_folder_written_by_two_ranks_has_the_bytes_of_one_process(
    name: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    save(name, tmp_path)
    for found in run_ranks(export_rank, 2, name, layout, str(tmp_path), tmp_path=tmp_path, env=ENV, timeout=170):
        assert found == []


def failing_rank(rank: int, world_size: int, folder: str) -> str:
    """Rank 1 finds a file gone that was there when the model was made."""
    model = from_pretrained(folder, {"pp_size": 2})
    if rank == 1:
        record = vars(model)[RECORD]
        record.stored = {
            name: replace(one, path=one.path.with_name(f"gone-{one.path.name}")) for name, one in record.stored.items()
        }
    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, pp_size=2))
    try:
        accelerator.prepare(model)
    except CheckpointError as error:
        return str(error)
    finally:
        accelerator.hf_parallel.watchdog.stop()
    return ""


def test_all_ranks_say_what_one_of_them_could_not_read(tmp_path: Path) -> None:
    save("llama", tmp_path)
    first, second = run_ranks(failing_rank, 2, str(tmp_path / "llama"), tmp_path=tmp_path, env=ENV)
    assert first == second
    assert "gone-model.safetensors: model." in first
    assert "cannot be read: No such file" in first


def without_cpu_rank(rank: int, world_size: int, store: str) -> list[float]:
    """Weights of two stages meet on rank 0 although the default group, like one of NCCL, takes no tensors of the CPU."""
    dist.init_process_group("cuda:gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    mesh = Mesh.build(MeshShape(1, 2, 1), timeout=timedelta(seconds=30))
    entries = {
        name: Entry(name, (name,), (2,), torch.float32, "param", (stage,), None, True)
        for stage, name in enumerate(("first", "last"))
    }
    mine = torch.full((2,), 1.0 + rank)
    found = gather_tensors(Ledger(entries), {("first", "last")[rank]: mine}, mesh)
    dist.barrier(group=mesh.host_group)
    dist.destroy_process_group()
    return [float(tensor.sum()) for tensor in found.values()]


def test_weights_travel_through_host_memory_where_the_default_group_takes_none(tmp_path: Path) -> None:
    assert run_ranks(without_cpu_rank, 2, str(tmp_path / "cuda_only"), tmp_path=tmp_path, init_group=False) == [
        [2.0, 4.0],
        [],
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_never_has_much_more_than_its_share_in_memory() -> None:
    """A model of 1.1 GB under three layouts; the bounds are those of benchmarks/load_memory.py."""
    from benchmarks import load_memory

    rows = load_memory.run(36, list(load_memory.LAYOUTS), whole=False)
    assert len(rows) == 8
    assert [row for row in rows if row["above"]] == []


def refusing_rank(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What a model with large random weights in its config, one that is checkpointed, and one that is cut wrongly hear."""
    from accelerate.state import AcceleratorState

    from hf_parallel.engine.plan import plans
    from hf_parallel.engine.plan import shards as plan_shards
    from hf_parallel.model import narrow
    from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan
    from hf_parallel.tensor_parallel.plan import plan_for

    narrow.SMALL = 0  # type: ignore[misc]
    planned = [sizes_of_calls(where, "plan_model") for where in (plan_shards, plan_for)]
    found = {}

    def start(name: str, layout: dict[str, Any], change: Any = lambda model: None) -> None:
        AcceleratorState._reset_state()
        for sizes in planned:
            sizes.clear()
        with sharded_loading({}, **layout):
            model = AutoModelForCausalLM.from_pretrained(f"{folder}/wide")
        change(model)
        accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **layout))
        try:
            accelerator.prepare(model)
            found[name] = f"planned with {max(chain(*planned), default=0)}"
        except PlanError as error:
            found[name] = str(error)
        accelerator.hf_parallel.watchdog.stop()

    start("ordinary", {"tp_size": 2})
    start("spread", {"tp_size": 2}, lambda model: setattr(model.config, "initializer_range", 1.0))
    start("checkpointed", {"tp_size": 2}, lambda model: model.gradient_checkpointing_enable())
    start("hooked", {"tp_size": 2}, lambda model: model.model.layers[1].register_forward_hook(lambda *args: None))
    discover, crossings, of_the_model = plans.discover_stages, PipelinePlan.crossings, []

    def discovered(*args: Any, **options: Any) -> Any:
        plan = discover(*args, **options)
        of_the_model.append(plan.record)
        return plan

    def fewer(self: Any, lo: int) -> Any:
        received = crossings(self, lo)
        return received[:0] if any(self.record is record for record in of_the_model) else received

    plans.discover_stages, PipelinePlan.crossings = discovered, fewer  # type: ignore[method-assign]
    start("cut wrongly", {"pp_size": 2})
    return found


def test_what_narrow_models_say_of_a_model_that_is_not_read_yet(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wide = tiny.SMALL | {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4}
    LlamaForCausalLM(LlamaConfig(**wide)).save_pretrained(tmp_path / "wide")
    here, there = run_ranks(refusing_rank, 2, str(tmp_path), tmp_path=tmp_path, env=ENV, timeout=170)
    ordinary, *others = (
        int(here[name].removeprefix("planned with ")) for name in ("ordinary", "spread", "checkpointed", "hooked")
    )
    assert 0 < ordinary < 4 * 4 * 128 * 128
    assert max(others) <= ordinary  # hooks do not make it one of the real widths
    assert "self_check" in here["cut wrongly"]
    assert "to receive 0 tensors" in here["cut wrongly"]
    assert there["cut wrongly"] == here["cut wrongly"]


def checking_rank(rank: int, world_size: int, folder: str, layouts: dict[str, Any]) -> dict[str, list[int]]:
    """Elements of the models that are compared at the start, by layout; the real one has more."""
    from accelerate.state import AcceleratorState

    from hf_parallel.engine.plan import self_check
    from hf_parallel.model import narrow

    narrow.SMALL = 0  # type: ignore[misc]
    checked = sizes_of_calls(self_check, "check_split", "verify_model")
    found = {}
    for name, layout in layouts.items():
        AcceleratorState._reset_state()
        checked.clear()
        checkpointed = name.endswith("checkpointed")
        trainer, _ = train(f"{folder}/wide", Path(folder, name), layout, unread=True, checkpointed=checkpointed)
        trainer.accelerator.hf_parallel.watchdog.stop()
        found[name] = list(checked)
    return found


def test_a_model_whose_weights_are_read_after_the_cut_is_compared_as_a_narrow_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wide = tiny.SMALL | {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4}
    LlamaForCausalLM(LlamaConfig(**wide)).save_pretrained(tmp_path / "wide")
    layouts: dict[str, Any] = {"pp2": {"pp_size": 2}, "tp2": {"tp_size": 2}}
    layouts |= {f"{name} {how}": layout for how in ("again", "checkpointed") for name, layout in layouts.items()}
    layouts["off"] = {"pp_size": 2, "pipeline": {"self_check": "off"}}
    env = ENV | {"HF_PARALLEL_CACHE": str(tmp_path / "cache")}
    here, there = run_ranks(checking_rank, 2, str(tmp_path), layouts, tmp_path=tmp_path, env=env, timeout=170)
    assert here["off"] == here["pp2 again"] == here["tp2 again"] == []
    assert there == {name: [] for name in layouts}
    for name in ("pp2", "tp2", "pp2 checkpointed", "tp2 checkpointed"):
        (compared,) = here[name]
        assert compared < 4 * 4 * 128 * 128, name  # a quarter of the blocks' elements and less
