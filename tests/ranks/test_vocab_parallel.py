"""Vocabulary-parallel training on real ranks equals one process, and no rank ever holds whole logits."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tp_models import assert_equal_to_one_process, check_on_ranks, gathered, grads
from vocab_models import CASES, VOCAB, vocab_batch, vocab_model

from hf_parallel.checkpoints.weights.gather import gather_tensors, load_weights
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.vocab_plan import shard_vocabulary
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.shard_plan import TPPlan


pytestmark = pytest.mark.long


def plan_of(model: nn.Module) -> TPPlan:
    sample = vocab_batch(seed=11, length=5)
    return shard_vocabulary(model, plan_tensor_parallel(model, dist.get_world_size(), sample), sample, True)


def sharded(case: str, tp_rank: int) -> tuple[nn.Module, TPPlan]:
    model = vocab_model(case)
    plan = plan_of(model)
    apply_tensor_parallel(model, plan, dist.group.WORLD, tp_rank, lambda name: True)
    return model, plan


def backward(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    return losses


def window() -> list[dict[str, Any]]:
    """Three microbatches of one step, the second without any label, with the count of the whole."""
    batches: list[dict[str, Any]] = [vocab_batch(seed) for seed in range(3)]
    batches[1]["labels"] = torch.full_like(batches[1]["labels"], -100)
    count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    return [{**batch, "num_items_in_batch": count} for batch in batches]


def gradients_main(rank: int, world_size: int) -> None:
    for case in CASES:
        for batches in ([vocab_batch()], window()):
            reference = vocab_model(case)
            expected = backward(reference, batches)
            model, plan = sharded(case, rank)
            assert backward(model, batches) == pytest.approx(expected, rel=1e-5), case
            assert_equal_to_one_process(gathered(plan, grads(model)), grads(reference), 1e-5)


@pytest.mark.parametrize("tp_size", [2, 3])
def test_loss_and_gradients_equal_one_process(tp_size: int, tmp_path: Path) -> None:
    run_ranks(gradients_main, tp_size, tmp_path=tmp_path)


def steps(model: nn.Module) -> None:
    # A key bias has a zero gradient: a larger epsilon keeps AdamW from blowing its noise up to whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False, eps=1e-4)
    for seed in range(3):
        optimizer.zero_grad()
        backward(model, [vocab_batch(seed)])
        optimizer.step()


def optimizer_main(rank: int, world_size: int) -> None:
    for case in CASES:
        reference = vocab_model(case)
        steps(reference)
        model, plan = sharded(case, rank)
        steps(model)
        got = gathered(plan, {name: p.detach() for name, p in model.named_parameters()})
        assert_equal_to_one_process(got, {name: p.detach() for name, p in reference.named_parameters()}, 1e-5)


@pytest.mark.parametrize("tp_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parameters_after_three_steps_equal_one_process(tp_size: int, tmp_path: Path) -> None:
    run_ranks(optimizer_main, tp_size, tmp_path=tmp_path)


def autocast_main(rank: int, world_size: int) -> None:
    for case in ("llama_tied", "gemma2", "phi"):
        reference = vocab_model(case)
        model, plan = sharded(case, rank)
        with torch.autocast("cpu", torch.bfloat16):
            expected = reference(**vocab_batch(), use_cache=False).loss
            loss = model(**vocab_batch(), use_cache=False).loss
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
        expected.backward()
        loss.backward()
        full = gathered(plan, grads(model))
        plain = vocab_model(case)
        backward(plain, [vocab_batch()])
        for name, p in plain.named_parameters():
            # As far from the fp32 gradient as one process under autocast is, give or take its own rounding.
            exact = p.grad
            theirs = float((dict(reference.named_parameters())[name].grad - exact).norm())
            floor = 0.01 * float(exact.norm()) + 1e-4
            assert float((full[name] - exact).norm()) <= 2 * theirs + floor, name


def test_autocast_is_as_good_as_on_one_process(tmp_path: Path) -> None:
    run_ranks(autocast_main, 2, tmp_path=tmp_path)


class Largest(TorchDispatchMode):
    """Notes the shapes of all floats that have the size of whole logits, forward and backward."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.found: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() >= self.numel:
                self.found.add((str(func), tuple(tensor.shape)))
        return out


def memory_main(rank: int, world_size: int) -> None:
    rows, length = 8, 30  # more tokens than any width, so that nothing else is as large
    batch = vocab_batch(rows=rows, length=length)
    whole = rows * (length - 1) * VOCAB  # a model may drop the last position
    for case in CASES:
        with Largest(whole) as seen:
            backward(vocab_model(case), [batch])
        assert seen.found, f"{case}: the probe does not see the logits of one process"
        model, _ = sharded(case, rank)
        with Largest(whole) as seen:
            backward(model, [batch])
        attention = {(name, shape) for name, shape in seen.found if shape[-1] == shape[-2] == length}
        assert not seen.found - attention, f"{case}: {seen.found}"


def test_no_rank_makes_whole_logits_in_training(tmp_path: Path) -> None:
    run_ranks(memory_main, 2, tmp_path=tmp_path)


def copies_main(rank: int, world_size: int) -> None:
    model, plan = sharded("llama_tied", rank)
    losses = backward(model, [vocab_batch()])
    first = gathered(plan, grads(model))
    copied = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    copied.zero_grad(set_to_none=True)
    assert copied.tp_vocab is copied.lm_head.tp_vocab is copied.loss_function.mode is not model.tp_vocab
    assert backward(copied, [vocab_batch()]) == losses
    assert grads(model) == {}
    assert_equal_to_one_process(gathered(plan, grads(copied)), first, 1e-6)
    check_on_ranks(vocab_model("gemma2"), plan_of(vocab_model("gemma2")), dist.group.WORLD, rank, vocab_batch())


def test_a_deepcopy_trains_itself(tmp_path: Path) -> None:
    run_ranks(copies_main, 2, tmp_path=tmp_path)


def composed_main(rank: int, world_size: int, parallel: dict[str, Any], folder: str) -> None:
    """One optimizer step through accelerate on a mesh, against one process; then the weights through a file."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel import HFParallelPlugin

    for case in ("llama_tied", "llama", "gpt2", "gemma2", "phi", "phi_tied", "opt"):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        batch = vocab_batch(rows=8, length=30)
        reference = vocab_model(case)
        own = torch.optim.AdamW(reference.parameters(), lr=1e-3, foreach=False, eps=1e-4)
        (expected,) = backward(reference, [batch])
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        settings = {"tensor_parallel": {"vocab_parallel_loss": True}}
        accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin(settings, **parallel))
        model = vocab_model(case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, eps=1e-4)
        model, optimizer = accelerator.prepare(model, optimizer)
        session = accelerator.hf_parallel
        whole = 8 // parallel.get("num_microbatches", 1) * 29 * VOCAB
        with Largest(whole) as seen:
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
        assert all(shape[-2:] == (30, 30) for _, shape in seen.found), f"{case}: {seen.found}"
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        assert float(accelerator.clip_grad_norm_(model.parameters(), 0.5)) == pytest.approx(float(norm), rel=1e-5)
        attachment = session.engine.attachment
        vocabulary = [entry for entry in attachment.ledger if entry.shape[0] == VOCAB]
        assert vocabulary
        assert all(entry.spec == ShardSpec.contiguous(0, VOCAB) for entry in vocabulary)
        held = {name: p.grad for name, p in attachment.parameters.items() if p.grad is not None}
        got = gather_tensors(attachment.ledger, held, attachment.mesh, wanted=lambda entry: entry.kind == "param")
        if rank == 0:
            assert_equal_to_one_process(got, grads(reference), 1e-5)
        optimizer.step()
        own.step()
        state = accelerator.get_state_dict(model)
        file = Path(folder) / case / "model.safetensors"
        if rank == 0:
            wanted = {name: p.detach() for name, p in reference.named_parameters()}
            assert_equal_to_one_process({name: state[name] for name in wanted}, wanted, 1e-5)
            file.parent.mkdir()
            save_file({name: state[name].clone() for name in wanted}, file)
        dist.barrier()
        before = {name: p.detach().clone() for name, p in attachment.parameters.items()}
        with torch.no_grad():
            for p in attachment.parameters.values():
                p.zero_()
            load_weights(file.parent, attachment.ledger, attachment.parameters, attachment.mesh)
        assert all(torch.equal(p, before[name]) for name, p in attachment.parameters.items())
        session.watchdog.stop()


@pytest.mark.parametrize(
    "parallel", [{"tp_size": 3}, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}], ids=["tp3", "pp2_tp2"]
)
def test_training_saving_and_loading_on_a_mesh(parallel: dict[str, Any], tmp_path: Path) -> None:
    world_size = parallel["tp_size"] * parallel.get("pp_size", 1)
    run_ranks(
        composed_main,
        world_size,
        parallel,
        str(tmp_path),
        tmp_path=tmp_path,
        timeout=200,
        env={"ACCELERATE_USE_CPU": "true"},
    )
