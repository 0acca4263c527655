"""Experts on several replicas train as one stock process does.

If a row fails, a token reached another expert than it was routed to, the gradient of an expert was divided by the number of
its copies instead of that of the replicas, counted twice in the norm, or saved under the experts of another rank.
"""

from __future__ import annotations

import dataclasses
import re
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from callback_runs import assert_same_state, trained_with
from rank_runner import RankError, run_ranks
from resume_cases import SAVED_AT, Job, resumed, run_jobs, states_equal
from safetensors.torch import load_file
from trainer_cases import ENV, NO_NOISE, Case, Snapshots, compare, make_trainer, run_cases, wanted_cases
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from hf_parallel import sharded_loading
from hf_parallel.errors import UnsupportedError
from hf_parallel.expert_parallel import exchange as exchange_module
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.links import sent_of_ranks
from hf_parallel.planner.profile import profile_of
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.planner.recipe import mapping_of
from hf_parallel.tensor_parallel.run.functions import VirtualGroup


pytestmark = [pytest.mark.timeout(300)]


def case_of(name: str, model: str, world: int = 2, **settings: Any) -> tuple[int, Case]:
    """A run of a model: settings of the run and of hf_parallel."""
    own = {key: settings.pop(key) for key in list(settings) if key in ("batch", "accumulation", "variable_length")}
    arguments = NO_NOISE if model == "gpt_oss" or own.get("variable_length") else {}
    # Mixtral's auxiliary loss is that of each replica's tokens, as with plain replicas, so it must equal those.
    reference = world // settings.get("pp_size", 1) if model == "mixtral" else 1
    parallel = {"ep_size": 2, **settings}
    return world, Case(name, model=model, steps=3, arguments=arguments, parallel=parallel, reference=reference, **own)


WINDOWS = {"batch": 4, "accumulation": 3, "variable_length": True}
MATRIX = [
    case_of("dp2_ep2_mixtral", "mixtral"),
    case_of("dp2_ep2_gpt_oss", "gpt_oss"),
    case_of("dp2_ep2_windows_deepseek_v3", "deepseek_v3", **WINDOWS),
    case_of("dp2_ep2_zero1_deepseek_v3", "deepseek_v3", **{"zero.stage": 1}),
    case_of("dp2_ep2_offload_deepseek_v3", "deepseek_v3", **{"zero.stage": 1, "zero.offload_optimizer": "cpu"}),
    case_of("dp2_ep2_recompute_gpt_oss", "gpt_oss", every=1),
    case_of("dp2_ep2_selective_deepseek_v3", "deepseek_v3", every=1, **{"activation_checkpointing.mode": "selective"}),
    case_of("dp4_ep2_mixtral", "mixtral", 4),
    case_of("dp4_ep4_deepseek_v3", "deepseek_v3", 4, ep_size=4),
    case_of("dp4_ep2_zero1_windows_gpt_oss", "gpt_oss", 4, **{"zero.stage": 1}, **WINDOWS),
    case_of("pp2_ep2_deepseek_v3", "deepseek_v3", 4, pp_size=2, num_microbatches=2),
    case_of("pp2_ep2_zero1_windows_gpt_oss", "gpt_oss", 4, pp_size=2, **{"zero.stage": 1}, **WINDOWS),
    case_of(
        "pp2_ep2_zero_bubble_qwen3_moe", "qwen3_moe", 4, pp_size=2, schedule="zbv_zero_bubble", num_microbatches=4
    ),
]
DEFAULT = ("dp2_ep2_mixtral", "dp2_ep2_zero1_deepseek_v3")
SLOW = (
    "dp2_ep2_gpt_oss",
    "dp2_ep2_recompute_gpt_oss",
    "dp4_ep2_mixtral",
    "pp2_ep2_deepseek_v3",
)  # others contain them


def marked(case: Case) -> Any:
    marks: dict[str, Any] = {**dict.fromkeys(DEFAULT, ()), **dict.fromkeys(SLOW, pytest.mark.slow)}
    return pytest.param(case, id=case.name, marks=marks.get(case.name, pytest.mark.long))


def reference_of(case: Case) -> Case:
    """The stock run it must equal; layouts that read the same batches share it."""
    return dataclasses.replace(case, name=f"stock{case.reference}_{case.model}_{case.accumulation}", parallel=None)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    wanted = {case.name for case in wanted_cases(request, [case for _, case in MATRIX])}
    chosen = [(world, case) for world, case in MATRIX if case.name in wanted]
    stock = {reference_of(case).name: (case.reference, reference_of(case)) for _, case in chosen}
    found: dict[str, dict[str, Any]] = {}
    everything = [*chosen, *stock.values()]
    for world in sorted({world for world, _ in everything}):
        cases = [case for size, case in everything if size == world]
        found |= run_cases(cases, world, tmp_path_factory.mktemp(f"ranks{world}"))
    return found


@pytest.mark.parametrize("case", [marked(case) for _, case in MATRIX])
def test_experts_on_several_replicas_train_as_one_process(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    mine, reference = runs[case.name], runs[reference_of(case).name]
    compare(mine, reference)
    saved, expected = (load_file(Path(run["folder"]) / "final" / "model.safetensors") for run in (mine, reference))
    assert {name: tensor.shape for name, tensor in saved.items()} == {n: t.shape for n, t in expected.items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=1e-6)


CELLS = [
    ("ep2", "ep2"),
    ("ep2", "1"),
    ("ep2", "tp2"),
    ("1", "ep2xzero1"),
    ("dp4xep2xzero1", "pp2xep2"),
    ("pp2xep2", "ep2"),
]


@pytest.mark.long
def test_checkpoints_of_experts_resume_under_every_layout(tmp_path: Path) -> None:
    names = sorted({saved for saved, _ in CELLS})
    sources = {name: Job(name, str(tmp_path / f"saved-{name}"), model="deepseek_v3") for name in names}
    straight = dict(zip(sources, run_jobs(list(sources.values()), tmp_path), strict=True))
    jobs = [resumed(tmp_path, sources[saved], layout) for saved, layout in CELLS]
    for (saved, layout), job, losses in zip(CELLS, jobs, run_jobs(jobs, tmp_path), strict=True):
        expected = straight[saved][SAVED_AT:]
        assert losses == (expected if saved == layout else pytest.approx(expected, abs=1e-5)), (saved, layout)
        assert states_equal(Path(str(job.resume)), Path(job.folder) / "again"), (saved, layout)


class Looks(TrainerCallback):
    """What user code reads of gradients, and clips, between a backward pass and the step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.refused = ""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = dict(model.named_parameters())
        self.shapes = {name: tuple(p.grad.shape) for name, p in named.items()}
        norms = {name: float(p.grad.norm()) for name, p in named.items() if "experts" in name or "norm" in name}
        total = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        weights = float(sum(p.detach().norm() for p in model.parameters()))
        self.seen.append({**norms, "total": total, "weights": weights})
        try:
            next(p for name, p in named.items() if "experts" in name)[0]
        except UnsupportedError as error:
            self.refused = str(error)


def user_main(rank: int, world_size: int, settings: dict[str, Any], loss: str, folder: str) -> dict[str, Any]:
    """Norms that user code takes and clips by, text that is generated, and what is written and loaded again."""
    looks = Looks()
    case = Case("user", model="deepseek_v3", steps=3, clip=0.0, loss=loss, parallel=settings)
    trainer = make_trainer(case, Path(folder), world_size, [looks])
    trainer.train()
    prompts = [torch.arange(1, 4 + 3 * one).unsqueeze(0) for one in range(2)]
    mine = prompts if world_size == 1 else [prompts[rank]]
    model = trainer.model.eval()
    texts = [model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist() for prompt in mine]
    model.save_pretrained(Path(folder) / "saved")
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    held = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    with torch._C.DisableTorchFunction():
        held = sum(p.data.numel() for name, p in model.named_parameters() if ".experts." in name)
    return {"refused": looks.refused, "seen": looks.seen, "texts": texts, "shapes": looks.shapes, "held": held}


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1])
def test_user_code_sees_whole_experts(stage: int, tmp_path: Path) -> None:
    settings, loss = {"ep_size": 2, "zero.stage": stage}, "" if stage else "penalty"
    (alone,) = run_ranks(user_main, 1, {}, loss, str(tmp_path / "1"), tmp_path=tmp_path, init_group=False, env=ENV)
    ranks = run_ranks(user_main, 2, settings, loss, str(tmp_path / "2"), tmp_path=tmp_path, env=ENV)
    for rank, found in enumerate(ranks):
        assert found["shapes"] == alone["shapes"]
        assert 2 * found["held"] == alone["held"], "this rank holds half of the experts"
        for here, there in zip(found["seen"], alone["seen"], strict=True):
            assert here == pytest.approx(there, rel=1e-4)
        assert found["texts"] == [alone["texts"][rank]]
        assert re.search(r"__getitem__ of parameter .*, or set ep_size to 1 to keep it whole", found["refused"])
    saved, expected = (load_file(tmp_path / world / "saved" / "model.safetensors") for world in "21")
    assert saved.keys() == expected.keys()
    assert all(torch.allclose(saved[name], tensor, rtol=1e-4, atol=1e-6) for name, tensor in expected.items())


def fewer_rows(features: list[dict[str, list[int]]], first_rank: bool) -> dict[str, torch.Tensor]:
    """Of a batch of eight rows that two replicas share: all of the first, one of the second."""
    whole = tiny.collate(features)
    return whole if first_rank else {name: value[:1] for name, value in whole.items()}


def uneven_main(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    settings = {"ep_size": 2, "pp_size": 2, "num_microbatches": 4}
    case = Case("uneven", model="gpt_oss", steps=3, arguments=NO_NOISE, parallel=settings)
    snapshots = Snapshots(Path(folder))
    trainer = snapshots.trainer = make_trainer(case, Path(folder), world_size, [snapshots])

    def collate(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        if world_size > 1:
            return fewer_rows(features, rank < 2)
        return {name: torch.cat([value[:4], value[4:5]]) for name, value in tiny.collate(features).items()}

    trainer.data_collator = collate
    trainer.train()
    if world_size > 1:
        trainer.accelerator.hf_parallel.watchdog.stop()
    history = [{key: entry[key] for key in ("loss", "grad_norm")} for entry in trainer.state.log_history[:-1]]
    return {"folder": folder, "history": history, "counts": None}


@pytest.mark.long
def test_a_replica_with_fewer_rows_than_microbatches_runs_empty_ones(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tmp_path": tmp_path, "env": ENV}
    (alone,) = run_ranks(uneven_main, 1, str(tmp_path / "1"), init_group=False, **options)
    mine = run_ranks(uneven_main, 4, str(tmp_path / "4"), **options)[0]
    compare(mine, alone)


def loaded_main(rank: int, world_size: int, source: str, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train what each rank reads its own part of."""

    def load() -> Any:
        with sharded_loading({}, **settings):
            return AutoModelForCausalLM.from_pretrained(source)

    tiny.MODELS["loaded"] = load
    case = Case("loaded", model="loaded", steps=3, parallel=settings)
    snapshots = Snapshots(Path(folder))
    trainer = snapshots.trainer = make_trainer(case, Path(folder), world_size, [snapshots])
    before = sum(p.numel() for p in trainer.model.parameters() if not p.is_meta)
    trainer.train()
    if world_size > 1:
        trainer.accelerator.hf_parallel.watchdog.stop()
    history = [{key: entry[key] for key in ("loss", "grad_norm")} for entry in trainer.state.log_history[:-1]]
    return {"folder": folder, "history": history, "counts": None, "before": before}


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"ep_size": 2}, marks=pytest.mark.slow, id="ep2"),
        pytest.param({"ep_size": 2, "pp_size": 2, "num_microbatches": 2}, id="pp2_ep2"),
    ],
)
def test_each_rank_reads_its_own_experts(settings: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny.MODELS["qwen3_moe"]().save_pretrained(source)
    options: dict[str, Any] = {"tmp_path": tmp_path, "env": ENV}
    (alone,) = run_ranks(loaded_main, 1, str(source), {}, str(tmp_path / "1"), init_group=False, **options)
    world = 2 * settings.get("pp_size", 1)
    mine = run_ranks(loaded_main, world, str(source), settings, str(tmp_path / "ranks"), **options)[0]
    assert (mine["before"], alone["before"] > 0) == (0, True), "nothing is read before the cut"
    compare(mine, alone)


def refused_main(rank: int, world_size: int, model: str, settings: dict[str, Any], folder: str) -> None:
    case = Case("refused", model=model, steps=1, parallel=settings)
    trainer: Trainer = make_trainer(case, Path(folder), world_size)
    trainer.train()


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        ("llama", {"ep_size": 2}, "LlamaForCausalLM has no module that owns stacks of experts"),
        ("mixtral_lora_experts", {"ep_size": 2}, "has an adapter with ep_size=2"),
    ],
)
def test_what_cannot_be_spread_is_refused_with_its_name(
    model: str, settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=text):
        run_ranks(refused_main, 2, model, settings, str(tmp_path / "out"), tmp_path=tmp_path, env=ENV)


def counting_main(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """Bytes of hidden states that a step sends to experts, and what the planner says."""
    sent, exchange = [], exchange_module._all_to_all

    def counting(group: Any, rows: torch.Tensor, *lengths: list[int]) -> torch.Tensor:
        if rows.is_floating_point() and not isinstance(group, VirtualGroup):  # which is the check of the start
            sent.append(rows.shape[0] * width * rows.element_size())
        return exchange(group, rows, *lengths)

    case = Case("counted", model="mixtral", steps=1, parallel={"ep_size": 2})
    trainer = make_trainer(case, Path(folder), world_size)
    width = trainer.model.config.hidden_size
    with unittest.mock.patch.object(exchange_module, "_all_to_all", counting):
        trainer.train()
    trainer.accelerator.hf_parallel.watchdog.stop()
    rows = trainer.args.per_device_train_batch_size
    layout = layout_of(mapping_of(trainer.accelerator.hf_parallel.config, world_size, rows, "fp32"))
    length = len(trainer.train_dataset[0]["input_ids"])
    planned = sent_of_ranks(profile_of(trainer.model.config), Cluster(1, 2, "cpu"), layout, length)
    return {"sent": float(sum(sent)), "planned": float(planned["ep"])}


def test_the_planner_counts_what_travels_to_experts(tmp_path: Path) -> None:
    found = run_ranks(counting_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV)
    # Half of what is exchanged stays on its rank if tokens are spread evenly; results go from the rank that got more.
    assert sum(one["sent"] for one in found) / 2 == sum(one["planned"] for one in found) > 0


class LimitsExperts(TrainerCallback):
    """A hook on the gradient of each stack of experts, which depends on its size."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.register_hook(lambda gradient: gradient / (1 + 100 * gradient.norm()))


def hooked_main(rank: int, world_size: int, layouts: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"model": tiny.mixtral_plain, "max_steps": 3, "optim": "sgd", "learning_rate": 0.5}
    return [trained_with(LimitsExperts(), parallel, **options) for parallel in layouts]


def test_a_hook_sees_the_gradient_of_one_process(tmp_path: Path) -> None:
    [[wanted]] = run_ranks(hooked_main, 1, [None], tmp_path=tmp_path, env=ENV, init_group=False)
    layouts: list[dict[str, Any] | None] = [{"ep_size": 2}, {"ep_size": 2, "zero": {"stage": 1}}]
    for found in run_ranks(hooked_main, 2, layouts, tmp_path=tmp_path, env=ENV)[0]:
        assert found["history"] == pytest.approx(wanted["history"], rel=1e-5)
        assert_same_state(found["state"], wanted["state"])


class ReadsBetween(TrainerCallback):
    """A norm between the batches of a step, where experts have what tokens of two replicas gave, and all else has those of one."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def between_main(rank: int, world_size: int) -> str:
    options: dict[str, Any] = {"model": tiny.mixtral_plain, "max_steps": 1, "gradient_accumulation_steps": 2}
    with pytest.raises(UnsupportedError) as error:
        trained_with(ReadsBetween(), {"ep_size": 2}, **options)
    return str(error.value)


def test_gradients_of_experts_are_not_read_between_batches(tmp_path: Path) -> None:
    for text in run_ranks(between_main, 2, tmp_path=tmp_path, env=ENV):
        assert re.search(
            r"experts\..* of experts that replicas share \(ep_size above 1\), is read or limited between", text
        )
