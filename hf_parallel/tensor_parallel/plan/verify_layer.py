"""Numeric proof of one proposal: every rank of the block runs in this process, with the code that will train.

The block is copied, its parameters are perturbed (zeros and ones would hide mistakes), and it is run once whole and
once as all ranks, threads that really communicate. Accepted is a proposal whose outputs and gradients equal the whole
ones on every rank. Parameters and inputs whose gradients are equal only when summed over the ranks are marked so, and
the block is run again to prove it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.model.copies import deep_copy
from hf_parallel.model.tensors import map_tensors, tensors_in
from hf_parallel.tensor_parallel.plan.influence import Block
from hf_parallel.tensor_parallel.plan.propose import Candidate, Proposal
from hf_parallel.tensor_parallel.plan.trace import NOISE_SEED, agree
from hf_parallel.tensor_parallel.plan.virtual_ranks import run_sharded
from hf_parallel.tensor_parallel.shard_plan import InputRule, TPPlan


RANK_TIMEOUT_S = 60.0
Path = tuple[str | int, ...]


class RejectedError(Exception):
    """A proposal that does not reproduce the block; the message says which quantity differs."""


@dataclass
class _Outcome:
    """Results of one run of the block, whole or as one rank."""

    outputs: list[Tensor]
    parameters: dict[str, Tensor | None]
    inputs: dict[Path, Tensor | None]


class BlockVerifier:
    """Judges proposals for one candidate of one block.

    Args:
        block: The copy of the block.
        candidate: Layers to be paired, names relative to the block.
        tp_size: Number of ranks.
    """

    def __init__(self, block: Block, candidate: Candidate, tp_size: int) -> None:
        self.block = block
        self.candidate = candidate
        self.tp_size = tp_size
        self.after_row: list[int] | None = None
        self.reference = self._run(deep_copy(block.module))
        grads = [grad for grad in self.reference.parameters.values() if grad is not None and grad.numel()]
        # A gradient that is zero in exact arithmetic (a key bias under softmax) is noise: compare it to this.
        self.floor = 1e-2 * max((float(grad.abs().max()) for grad in grads), default=0.0)

    def verify(self, proposal: Proposal) -> Proposal:
        """`proposal` with its partial parameters and inputs filled in.

        Raises:
            RejectedError: If it does not reproduce the block.
        """
        ranks = self._run_ranks(proposal)
        self._check_outputs(ranks)
        partial, rules = self._partial_parameters(proposal, ranks), self._input_rules(proposal, ranks)
        if not partial and rules == proposal.pair.inputs:
            return proposal
        completed = replace(proposal, pair=replace(proposal.pair, partial=partial, inputs=rules))
        ranks = self._run_ranks(completed)
        self._check_outputs(ranks)
        if self._partial_parameters(completed, ranks) or self._input_rules(completed, ranks) != rules:
            raise RejectedError("gradients that are summed over the ranks do not equal the whole ones")
        return completed

    def _run_ranks(self, proposal: Proposal) -> list[_Outcome]:
        plan = TPPlan(self.tp_size, proposal.linears, (proposal.pair,), {}, {}, {})
        try:
            return run_sharded(lambda: deep_copy(self.block.module), plan, RANK_TIMEOUT_S, self._run)
        except Exception as error:  # the block's own code, run with sizes it was not written for, may raise anything
            raise RejectedError(f"raises {type(error).__name__}: {str(error).strip()[:100]}") from error

    def _run(self, module: nn.Module) -> _Outcome:
        """Run a block, whole or as a rank, and differentiate what depends on the row."""
        leaves: dict[Path, Tensor] = {}

        def leaf(path: Path, tensor: Tensor) -> Tensor:
            leaves[path] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return leaves[path]

        rows: list[Tensor] = []
        row = module.get_submodule(self.candidate.row)
        handle = row.register_forward_hook(lambda _, args, output: rows.extend(tensors_in(output)))
        try:
            args, kwargs = (map_tensors(leaf, part) for part in self.block.arguments)
            with torch.enable_grad():
                outputs = tensors_in(module(*args, **kwargs))
        finally:
            handle.remove()
        if self.after_row is None:
            self.after_row = [i for i, tensor in enumerate(outputs) if _depends(tensor, rows)]
        chosen = [outputs[i] for i in self.after_row]
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        learned = {path: tensor for path, tensor in leaves.items() if tensor.requires_grad}
        total = torch.stack([(tensor * cotangent(tensor)).sum() for tensor in chosen]).sum()
        grads = torch.autograd.grad(total, [*parameters.values(), *learned.values()], allow_unused=True)
        return _Outcome(
            [tensor.detach() for tensor in chosen],
            dict(zip(parameters, grads[: len(parameters)], strict=True)),
            dict(zip(learned, grads[len(parameters) :], strict=True)),
        )

    def _check_outputs(self, ranks: Sequence[_Outcome]) -> None:
        for outcome in ranks:
            for mine, whole in zip(outcome.outputs, self.reference.outputs, strict=True):
                if mine.shape != whole.shape:
                    raise RejectedError(f"the output has shape {tuple(mine.shape)} instead of {tuple(whole.shape)}")
                if not agree(mine, whole):
                    error = float((mine - whole).abs().max()) / max(float(whole.abs().max()), 1e-30)
                    raise RejectedError(f"the output differs by {error:.1e} of its largest value")

    def _partial_parameters(self, proposal: Proposal, ranks: Sequence[_Outcome]) -> tuple[str, ...]:
        plan = TPPlan(self.tp_size, proposal.linears, (proposal.pair,), {}, {}, {})
        specs = plan.shard_specs()
        partial = []
        for name, whole in self.reference.parameters.items():
            parts = [outcome.parameters[name] for outcome in ranks]
            spec = specs.get(name)
            if spec is None:
                if self._is_partial(name, parts, whole):
                    partial.append(name)
                continue
            if whole is None and all(part is None for part in parts):
                continue
            full = torch.zeros_like(self.block.module.get_parameter(name)) if whole is None else whole
            for rank, part in enumerate(parts):
                expected = spec.shard(full, self.tp_size, rank)
                if not agree(torch.zeros_like(expected) if part is None else part, expected, self.floor):
                    raise RejectedError(f"the gradient of {name} differs")
        return tuple(partial)

    def _input_rules(self, proposal: Proposal, ranks: Sequence[_Outcome]) -> tuple[InputRule, ...]:
        rules = list(proposal.pair.inputs)
        for path, whole in self.reference.inputs.items():
            if self._is_partial(f"input {path}", [outcome.inputs[path] for outcome in ranks], whole):
                rules.append(InputRule(path, None, 0))
        return tuple(rules)

    def _is_partial(self, name: str, parts: list[Tensor | None], whole: Tensor | None) -> bool:
        """Whether the ranks' gradients must be summed; equal gradients need nothing."""
        known = next((part for part in [whole, *parts] if part is not None), None)
        if known is None:
            return False
        zero = torch.zeros_like(known)
        reference = zero if whole is None else whole
        values = [zero if part is None else part for part in parts]
        if all(agree(value, reference, self.floor) for value in values):
            return False
        if any(value.shape != reference.shape for value in values):
            raise RejectedError(f"the gradient of {name} has another shape")
        if not agree(torch.stack(values).sum(0), reference, self.floor):
            raise RejectedError(f"the gradient of {name} differs")
        return True


def _depends(tensor: Tensor, rows: Sequence[Tensor]) -> bool:
    sources = [row for row in rows if row.requires_grad]
    if not tensor.requires_grad or not tensor.is_floating_point() or not sources:
        return False
    grads: Any = torch.autograd.grad(tensor.sum(), sources, allow_unused=True, retain_graph=True)
    return any(grad is not None for grad in grads)


def cotangent(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
