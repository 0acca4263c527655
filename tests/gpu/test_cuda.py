"""Training on CUDA tensors, several ranks on one GPU: gloo groups, activations through pinned host memory.

Proves kernels, streams, pinned copies, autocast and the fp16 scaler; not NCCL, which needs a GPU a rank.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from trainer_cases import NO_NOISE, Case, ranks_main, stock

from hf_parallel.activation_checkpointing.host_copies import HostCopy
from hf_parallel.activation_checkpointing.recompute import recompute_blocks
from hf_parallel.data_parallel.host import HostMemory


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

PP2 = {"pp_size": 2, "num_microbatches": 4}
FOUR_STEPS: dict[str, Any] = {"device": "cuda", "steps": 4, "arguments": NO_NOISE}
TWO_RANKS = [
    Case("pp2", parallel=PP2, device="cuda", arguments=NO_NOISE),
    Case("pp2_accumulation", parallel=PP2, accumulation=3, variable_length=True, **FOUR_STEPS),
    Case("pp2_eval", model="llama_tied", parallel=PP2, evaluate=True, metrics=True, **FOUR_STEPS),
    Case("pp2_subclass", parallel=PP2, loss="subclass", variable_length=True, **FOUR_STEPS),
    Case("tp2", model="llama_tied", parallel={"tp_size": 2}, variable_length=True, **FOUR_STEPS),
    Case("tp2_qwen3", model="qwen3", parallel={"tp_size": 2}, accumulation=2, **FOUR_STEPS),
    Case("dp2", accumulation=2, **FOUR_STEPS),
]
FOUR_RANKS = [
    Case("pp2_tp2", model="llama_tied", parallel={**PP2, "tp_size": 2}, accumulation=2, **FOUR_STEPS),
    Case("pp2_dp2", model="llama_tied", parallel=PP2, accumulation=2, **FOUR_STEPS),
]
HALF = [
    Case("pp2_bf16", parallel=PP2, device="cuda", arguments={"bf16": True}),
    Case("tp2_bf16", parallel={"tp_size": 2}, device="cuda", arguments={"bf16": True}),
    Case("pp2_fp16", parallel=PP2, device="cuda", arguments={"fp16": True}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for world_size, chosen in (
        (1, [stock(case) for case in TWO_RANKS + FOUR_RANKS + HALF]),
        (2, TWO_RANKS + HALF),
        (4, FOUR_RANKS),
    ):
        folder = tmp_path_factory.mktemp(f"world{world_size}")
        results = run_ranks(
            ranks_main, world_size, chosen, str(folder), tmp_path=folder, timeout=200, init_group=world_size > 1
        )
        found |= {case.name: result for case, result in zip(chosen, results[0], strict=True)}
    return found


@pytest.mark.parametrize("case", TWO_RANKS + FOUR_RANKS, ids=lambda case: case.name)
def test_a_mesh_on_one_gpu_trains_as_one_process(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    mine, reference = runs[case.name], runs[f"stock_{case.name}"]
    for here, there in zip(mine["history"], reference["history"], strict=True):
        for key, value in there.items():
            assert here[key] == pytest.approx(value, abs=2e-5), key
    for file in ("gradients.safetensors", "parameters.safetensors"):
        tensors, expected = (load_file(Path(run["folder"]) / file) for run in (mine, reference))
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            difference = float((tensors[name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
            assert difference <= 1e-5, f"{file}: {name} differs by {difference:.1e} relative"


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.name)
def test_half_precision_follows_one_process(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    mine, reference = runs[case.name], runs[f"stock_{case.name}"]
    for here, there in zip(mine["history"], reference["history"], strict=True):
        if "loss" in there:
            assert here["loss"] == pytest.approx(there["loss"], abs=1e-2)


def test_inputs_of_checkpoints_go_to_pinned_memory_and_back() -> None:
    model = tiny.llama().cuda()
    ids = torch.randint(1, tiny.VOCAB, (2, 16), device="cuda")
    found = []
    for offload in (None, False, True):
        if offload is not None:
            model = tiny.llama().cuda()
            products = 2 if offload else None
            groups = [range(j, j + 1) for j in range(4)]
            recompute_blocks(model, "model.layers", groups, offload=offload, products=products)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        copies = [item for item in gc.get_objects() if type(item) is HostCopy]
        assert len(copies) == (4 if offload else 0)
        assert all(copy.host.is_pinned() for copy in copies)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for expected, *others in zip(*found, strict=True):
        for mine in others:
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_parts_land_in_pinned_memory() -> None:
    host = HostMemory(torch.device("cuda", 0), pinned=True)
    source = torch.randn(1 << 20, device="cuda")
    target = host.empty(source.numel(), source.dtype)
    expected = (source * 3).cpu()
    host.copy_down(source * 3, target)
    host.wait()
    assert target.is_pinned()
    assert torch.equal(target, expected)
