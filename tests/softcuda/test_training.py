"""Training on soft CUDA devices equals one process; `make test-softcuda` gives pytest the devices."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from rank_runner import run_ranks
from safetensors.torch import load_file
from trainer_cases import NO_NOISE, Case, compare, wanted_cases

from softcuda.soft_cases import trained


PP2 = {"pp_size": 2, "num_microbatches": 4}
RECOMPUTED = {"activation_checkpointing": {"every": 1, "offload": True}}
SHORT: dict[str, Any] = {"device": "cuda", "steps": 3}
SAVED = {"device": "cuda", "steps": 4, "save": True}
EXACT = [
    Case("pp2", parallel=PP2, **SHORT),
    Case("pp2_zbv", parallel={**PP2, "schedule": "zbv_zero_bubble"}, **SHORT),
    Case("pp2_dualpipev", parallel={**PP2, "schedule": "dualpipev"}, **SHORT),
    Case("pp2_interleaved", parallel={**PP2, "schedule": "interleaved_1f1b"}, **SHORT),
    Case("pp2_recomputed", parallel={**PP2, **RECOMPUTED}, **SHORT),
    Case("pp2_evaluated", parallel=PP2, model="llama_tied", evaluate=True, metrics=True, **SHORT),
    Case("tp2", parallel={"tp_size": 2}, model="llama_tied", accumulation=2, variable_length=True, **SHORT),
    Case("tp2_sequence", parallel={"tp_size": 2, "sequence_parallel": True}, **SHORT),
    Case("tp2_evaluated", parallel={"tp_size": 2}, evaluate=True, metrics=True, **SHORT),
    Case("dp2", accumulation=2, variable_length=True, **SHORT),
    Case("dp2_recomputed", parallel=RECOMPUTED, **SHORT),
    Case("dp2_evaluated", evaluate=True, metrics=True, eval_count=40, **SHORT),
    Case("zero1", parallel={"zero": {"stage": 1}}, **SHORT),
    Case("zero1_late", parallel={"zero": {"stage": 1, "overlap_gather": True}}, **SHORT),
    Case("zero1_offloaded", parallel={"zero": {"stage": 1, "offload_optimizer": "cpu"}}, **SHORT),
    Case("zero2", parallel={"zero": {"stage": 2}}, accumulation=2, **SHORT),
    Case("zero2_offloaded", parallel={"zero": {"stage": 2, "offload_optimizer": "cpu"}}, accumulation=2, **SHORT),
    Case("zero3", parallel={"zero": {"stage": 3}}, model="llama_tied", arguments=NO_NOISE, **SHORT),
    Case("sp2_ulysses", parallel={"sp_size": 2, "sp_attention": "ulysses"}, **SHORT),
    Case("sp2_ring", parallel={"sp_size": 2, "sp_attention": "ring"}, **SHORT),
    Case("sp2_ring_evaluated", parallel={"sp_size": 2, "sp_attention": "ring"}, evaluate=True, **SHORT),
    Case("ep2", parallel={"ep_size": 2}, model="mixtral_plain", **SHORT),
    Case("pp2_saved", parallel=PP2, **SAVED),
    Case("tp2_saved", parallel={"tp_size": 2}, **SAVED),
    Case("zero2_saved", parallel={"zero": {"stage": 2}}, **SAVED),
]
HALF = [
    Case("pp2_bf16", parallel=PP2, arguments={"bf16": True}, **SHORT),
    Case("tp2_bf16", parallel={"tp_size": 2}, arguments={"bf16": True}, **SHORT),
    Case("zero1_bf16", parallel={"zero": {"stage": 1}}, arguments={"bf16": True}, **SHORT),
    Case("pp2_fp16", parallel=PP2, arguments={"fp16": True}, **SHORT),
    Case("dp2_fp16", arguments={"fp16": True}, **SHORT),
    Case("zero2_fp16", parallel={"zero": {"stage": 2}}, arguments={"fp16": True}, **SHORT),
]
LOSSY = [
    Case("int8", parallel={"gradient_compression": {"method": "int8"}}, **SHORT),
    Case("powersgd", parallel={"gradient_compression": {"method": "powersgd", "warmup_ratio": 0}}, **SHORT),
]
# Each rank on a device of its own: tensors of rank 1 are on cuda:1, and a tensor on cuda:0 there is a mistake.
TWO_DEVICES = [
    Case("pp2_devices", parallel=PP2, **SHORT),
    Case("tp2_devices", parallel={"tp_size": 2, "sequence_parallel": True}, **SHORT),
    Case("zero1_devices", parallel={"zero": {"stage": 1, "offload_optimizer": "cpu"}}, **SHORT),
]

pytestmark = [pytest.mark.softcuda, pytest.mark.timeout(900)]


def resumed(case: Case) -> Case:
    return dataclasses.replace(case, resume_at=2)


def on_one_process(case: Case) -> Case:
    return dataclasses.replace(case, name="", parallel=None, save=False)


def launched(world_size: int, cases: list[Case], folder: Path, env: dict[str, str] | None = None) -> list[Any]:
    folder.mkdir(exist_ok=True)
    if not cases:
        return []
    return run_ranks(
        *(trained, world_size, cases, str(folder)),
        tmp_path=folder,
        timeout=420,
        init_group=world_size > 1,
        env=env,
    )[0]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By name of a chosen case: what it logged on two ranks, and on one process; or the error."""
    folder = tmp_path_factory.mktemp("softcuda")
    exact, lossy, devices = (wanted_cases(request, cases) for cases in (EXACT, LOSSY, TWO_DEVICES))
    cases = exact + wanted_cases(request, HALF) + lossy
    stock = {repr(on_one_process(case)): on_one_process(case) for case in cases + devices}
    numbered = [dataclasses.replace(case, name=str(index)) for index, case in enumerate(stock.values())]
    found: dict[str, Any] = dict(zip(stock, launched(1, numbered, folder / "stock"), strict=True))
    names = [case.name for case in cases]
    found |= zip(names, launched(2, cases, folder / "ranks"), strict=True)
    again = [resumed(case) for case in exact if case.save]
    for case in again:  # the run that goes on writes into its folder
        shutil.copytree(folder / "ranks" / case.name, folder / "ranks_again" / case.name)
    found |= zip([f"{case.name} again" for case in again], launched(2, again, folder / "ranks_again"), strict=True)
    on_the_cpu = [dataclasses.replace(case, device="cpu") for case in lossy]
    env = {"ACCELERATE_USE_CPU": "true"}
    found |= zip([f"{case.name} cpu" for case in lossy], launched(2, on_the_cpu, folder / "cpu", env), strict=True)
    env = {"CUDA_VISIBLE_DEVICES": "0,1"}
    names = [case.name for case in devices]
    return found | dict(zip(names, launched(2, devices, folder / "devices", env), strict=True))


def result(runs: dict[str, Any], name: str) -> dict[str, Any]:
    assert isinstance(runs[name], dict), runs[name]
    return runs[name]


@pytest.mark.parametrize("case", EXACT + TWO_DEVICES, ids=lambda case: case.name)
def test_ranks_on_soft_devices_train_as_one_process(case: Case, runs: dict[str, Any]) -> None:
    compare(result(runs, case.name), result(runs, repr(on_one_process(case))))


@pytest.mark.parametrize("case", [case for case in EXACT if case.save], ids=lambda case: case.name)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(case: Case, runs: dict[str, Any]) -> None:
    whole, again = (
        load_file(Path(result(runs, name)["folder"]) / "final" / "model.safetensors")
        for name in (case.name, f"{case.name} again")
    )
    assert all((again[name] - tensor).abs().max() <= 1e-6 for name, tensor in whole.items())


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.name)
def test_half_precision_follows_one_process(case: Case, runs: dict[str, Any]) -> None:
    mine, reference = result(runs, case.name)["history"], result(runs, repr(on_one_process(case)))["history"]
    losses, expected = ([entry["loss"] for entry in history if "loss" in entry] for history in (mine, reference))
    assert losses == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("case", LOSSY, ids=lambda case: case.name)
def test_compressed_gradients_are_those_of_the_cpu(case: Case, runs: dict[str, Any]) -> None:
    mine, expected = result(runs, case.name)["history"], result(runs, f"{case.name} cpu")["history"]
    # Attention of another kernel differs in the last bit, and a value between two codes may get the other one: no more than this.
    for here, there in zip(mine, expected, strict=True):
        assert here == pytest.approx(there, abs=1e-5)
