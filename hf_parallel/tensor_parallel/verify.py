"""Numeric proof of one column -> row pair: every virtual rank of it runs in this process, and the parts must add up.

The block is copied, its parameters are perturbed (zeros and ones would hide mistakes), and it is run once whole and
once as each rank. Accepted is a proposal whose partial outputs and gradients sum or concatenate to the whole ones;
which parameters and inputs then carry partial gradients is a result, not a guess.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_parallel.tensor_parallel.functions import take_heads
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.plan import InputRule
from hf_parallel.tensor_parallel.propose import Candidate, Proposal, set_integer
from hf_parallel.tensor_parallel.trace import (
    NOISE_SEED,
    LinearInfo,
    agree,
    map_tensors,
    only_tensor,
    perturb,
    tensors_in,
    widen,
)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Path = tuple[str | int, ...]


class RejectedError(Exception):
    """A proposal that does not reproduce the block; the message says which quantity differs."""


@dataclass(frozen=True)
class Verdict:
    """What an accepted proposal needs besides its layouts; names are relative to the root."""

    partial: tuple[str, ...]
    inputs: tuple[InputRule, ...]


@dataclass
class _Outcome:
    """Results of one run of the block, whole or as one rank."""

    y: Tensor
    tail: list[Tensor]
    tail_grads: list[Tensor]
    entry_grads: list[Tensor | None]
    weight_grads: dict[str, Tensor | None]
    parameter_grads: dict[str, Tensor | None]
    input_grads: dict[Path, Tensor | None]
    row_output: Tensor
    upstream: set[Any]


@dataclass
class _Probe:
    """Tensors met while the block runs."""

    entries: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    partial_output: Tensor | None = None
    row_output: Tensor | None = None


class BlockVerifier:
    """Judges proposals for one pair of one block.

    Args:
        root: The module that contains the pair; it is copied, never touched.
        candidate: The pair, names relative to `root`.
        linears: Linears of `root` by relative name.
        arguments: Arguments of a call of `root`, as `capture_inputs` returns them.
        tp_size: Number of ranks.
    """

    def __init__(
        self,
        root: nn.Module,
        candidate: Candidate,
        linears: Mapping[str, LinearInfo],
        arguments: Arguments,
        tp_size: int,
    ) -> None:
        self.root = widen(copy.deepcopy(root)).eval()
        perturb(self.root)
        for parameter in self.root.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        self.candidate = candidate
        self.linears = linears
        self.arguments = arguments
        self.tp_size = tp_size
        self.reference = self._run(None, 0, None)
        grads = [*self.reference.weight_grads.values(), *self.reference.parameter_grads.values()]
        # A gradient that is zero in exact arithmetic (a key bias under softmax) is noise: compare it to this.
        self.floor = 1e-2 * max((float(grad.abs().max()) for grad in grads if grad is not None), default=0.0)

    def verify(self, proposal: Proposal) -> Verdict:
        """Run `proposal` as every rank and compare with the whole block.

        Raises:
            RejectedError: If it does not reproduce the block.
        """
        try:
            ranks = [self._run(proposal, rank, self.reference.row_output) for rank in range(self.tp_size)]
        except Exception as error:  # the block's own code, run with sizes it was not written for, may raise anything
            raise RejectedError(f"raises {type(error).__name__}: {str(error).strip()[:100]}") from error
        self._check_values(ranks)
        self._check_weight_grads(proposal, ranks)
        return Verdict(self._partial_parameters(proposal, ranks), self._input_rules(proposal, ranks))

    def _run(self, proposal: Proposal | None, rank: int, row_output: Tensor | None) -> _Outcome:
        """Run the block whole (no proposal) or as one rank, and differentiate the row's partial output."""
        leaves: dict[Path, Tensor] = {}
        args, kwargs = (map_tensors(_leaf_maker(leaves), part) for part in self.arguments)
        if proposal is not None:
            rules = {rule.path: rule for rule in proposal.inputs}

            def cut(path: Path, tensor: Tensor) -> Tensor:
                rule = rules.get(path)
                if rule is None or rule.dim is None:
                    return tensor
                return take_heads(tensor, rule.dim, rule.heads, self.tp_size, rank)

            args, kwargs = map_tensors(cut, args), map_tensors(cut, kwargs)
        probe = _Probe(row_output=row_output)
        with self._as_rank(proposal, rank, probe), torch.enable_grad():
            output = self.root(*args, **kwargs)
            expected = sorted((*self.candidate.columns, self.candidate.row))
            if sorted(probe.calls) != expected or probe.partial_output is None or probe.row_output is None:
                raise RejectedError("a linear of the pair runs more or less than once per call of the block")
            return self._differentiate(probe, leaves, output)

    def _differentiate(self, probe: _Probe, leaves: dict[Path, Tensor], output: Any) -> _Outcome:
        y, row_output = probe.partial_output, probe.row_output
        if y is None or row_output is None:
            raise RejectedError("the row linear is not reached")
        entries = list(probe.entries.values())
        learned = {path: leaf for path, leaf in leaves.items() if leaf.requires_grad}
        parameters = {name: p for name, p in self.root.named_parameters() if p.requires_grad}
        wanted = [leaf for _, leaf in entries] + [*probe.weights.values(), *parameters.values(), *learned.values()]
        grads: list[Tensor | None] = list(
            torch.autograd.grad(y, wanted, _cotangent(y), allow_unused=True, retain_graph=True)
        )
        split = [len(entries), len(entries) + len(probe.weights), len(wanted) - len(learned)]
        sources = [x for x, _ in entries if x.requires_grad]
        targets: dict[Any, Tensor] = {**parameters, **learned}
        reached = (
            torch.autograd.grad(
                [x.sum() for x in sources], list(targets.values()), allow_unused=True, retain_graph=True
            )
            if sources and targets
            else ()
        )
        tail, tail_grads = _tail(output, row_output)
        return _Outcome(
            y=y.detach(),
            tail=tail,
            tail_grads=tail_grads,
            entry_grads=grads[: split[0]],
            weight_grads=dict(zip(probe.weights, grads[split[0] : split[1]], strict=True)),
            parameter_grads=dict(zip(parameters, grads[split[1] : split[2]], strict=True)),
            input_grads=dict(zip(learned, grads[split[2] :], strict=True)),
            row_output=row_output.detach(),
            upstream={key for key, grad in zip(targets, reached, strict=False) if grad is not None},
        )

    @contextlib.contextmanager
    def _as_rank(self, proposal: Proposal | None, rank: int, probe: _Probe) -> Iterator[None]:
        """The copied block with this rank's weights, attributes and per-head tensors; undone on exit."""
        undo: list[tuple[dict[str, Any], str, Any]] = []

        def put(holder: dict[str, Any], key: str, value: Any) -> None:
            undo.append((holder, key, holder.get(key)))
            holder[key] = value

        try:
            if proposal is not None:
                for rewrite in proposal.rewrites:
                    module = self.root.get_submodule(rewrite.module)
                    key = rewrite.attribute.partition(".")[0]
                    undo.append((vars(module), key, vars(module)[key]))
                    set_integer(module, rewrite.attribute, rewrite.value)
                for name, spec in proposal.sliced:
                    path, _, key = name.rpartition(".")
                    module = self.root.get_submodule(path)
                    holder: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
                    shard = spec.shard(holder[key].detach(), self.tp_size, rank)
                    put(holder, key, nn.Parameter(shard) if holder is module._parameters else shard)
            layouts = dict(proposal.layouts) if proposal is not None else {}
            for name in self.candidate.columns:
                put(vars(self.root.get_submodule(name)), "forward", self._column(name, layouts.get(name), rank, probe))
            row = self._row(None if proposal is None else proposal.row, rank, probe)
            put(vars(self.root.get_submodule(self.candidate.row)), "forward", row)
            yield
        finally:
            for holder, key, value in reversed(undo):
                holder[key] = value
                if value is None and key == "forward":
                    del holder[key]

    def _column(self, name: str, spec: ShardSpec | None, rank: int, probe: _Probe) -> Callable[..., Tensor]:
        module, info = self.root.get_submodule(name), self.linears[name]
        parts = {"weight": module._parameters["weight"], "bias": module._parameters.get("bias")}
        for key, parameter in parts.items():
            if parameter is not None:
                layout = spec if spec is None or key == "weight" else replace(spec, dim=0)
                full = parameter.detach()
                local = full.clone() if layout is None else layout.shard(full, self.tp_size, rank)
                probe.weights[f"{name}.{key}"] = local.requires_grad_()
        weight, bias = probe.weights[f"{name}.weight"], probe.weights.get(f"{name}.bias")

        def forward(*args: Tensor, **named: Tensor) -> Tensor:
            x = only_tensor(args, named)
            probe.calls.append(name)
            _, leaf = probe.entries.setdefault(id(x), (x, x.detach().clone().requires_grad_()))
            return F.linear(leaf, weight.t() if info.transposed else weight, bias)

        return forward

    def _row(self, spec: ShardSpec | None, rank: int, probe: _Probe) -> Callable[..., Tensor]:
        name = self.candidate.row
        module, info = self.root.get_submodule(name), self.linears[name]
        full = self.root.get_parameter(f"{name}.weight").detach()
        weight = (full.clone() if spec is None else spec.shard(full, self.tp_size, rank)).requires_grad_()
        bias = module._parameters.get("bias")
        probe.weights[f"{name}.weight"] = weight

        def forward(*args: Tensor, **named: Tensor) -> Tensor:
            x = only_tensor(args, named)
            probe.calls.append(name)
            probe.partial_output = F.linear(x, weight.t() if info.transposed else weight)
            if probe.row_output is None:
                total = probe.partial_output if bias is None else probe.partial_output + bias
                probe.row_output = total
            probe.row_output = probe.row_output.detach().clone().requires_grad_()
            return probe.row_output

        return forward

    def _check_values(self, ranks: Sequence[_Outcome]) -> None:
        reference = self.reference
        if any(outcome.y.shape != reference.y.shape for outcome in ranks):
            raise RejectedError("the partial outputs have another shape")
        if not agree(_sum([outcome.y for outcome in ranks]), reference.y):
            raise RejectedError("the partial outputs do not sum to the output")
        for outcome in ranks:
            pairs = zip([*outcome.tail, *outcome.tail_grads], [*reference.tail, *reference.tail_grads], strict=False)
            if len(outcome.tail) != len(reference.tail) or not all(agree(a, b) for a, b in pairs):
                raise RejectedError("what the block computes after the row linear differs")

    def _check_weight_grads(self, proposal: Proposal, ranks: Sequence[_Outcome]) -> None:
        for index, expected in enumerate(self.reference.entry_grads):
            parts = [outcome.entry_grads[index] for outcome in ranks]
            if not self._sums_to(parts, expected):
                raise RejectedError("the input gradients do not sum to the whole one")
        layouts = {f"{name}.weight": spec for name, spec in proposal.layouts}
        layouts |= {f"{name}.bias": replace(spec, dim=0) for name, spec in proposal.layouts}
        layouts[f"{self.candidate.row}.weight"] = proposal.row
        for name, expected in self.reference.weight_grads.items():
            if expected is None:
                continue
            total = torch.zeros_like(expected)
            for rank, outcome in enumerate(ranks):
                grad = outcome.weight_grads[name]
                if grad is not None:  # whole sections add up, split ones land in their own places
                    total.index_add_(layouts[name].dim, layouts[name].index(self.tp_size, rank).to(grad.device), grad)
            if not agree(total, expected, self.floor):
                raise RejectedError(f"the gradient of {name} differs")

    def _partial_parameters(self, proposal: Proposal, ranks: Sequence[_Outcome]) -> tuple[str, ...]:
        sliced = dict(proposal.sliced)
        partial = []
        for name, expected in self.reference.parameter_grads.items():
            parts = [outcome.parameter_grads.get(name) for outcome in ranks]
            spec = sliced.get(name)
            if spec is not None:
                known = [part for part in parts if part is not None]
                if expected is None and not known:
                    continue
                if (
                    expected is None
                    or len(known) < len(parts)
                    or not agree(spec.assemble(known), expected, self.floor)
                ):
                    raise RejectedError(f"the gradient of the per-head parameter {name} differs")
            elif self._is_partial(name, parts, expected, name in self.reference.upstream):
                partial.append(name)
        return tuple(partial)

    def _input_rules(self, proposal: Proposal, ranks: Sequence[_Outcome]) -> tuple[InputRule, ...]:
        rules = list(proposal.inputs)
        cut = {rule.path for rule in rules}
        for path, expected in self.reference.input_grads.items():
            parts = [outcome.input_grads.get(path) for outcome in ranks]
            upstream = path in self.reference.upstream
            if path in cut:
                if upstream or not self._sums_to(parts, expected):
                    raise RejectedError(f"the gradient of the sliced input {path} differs")
            elif self._is_partial(f"input {path}", parts, expected, upstream):
                rules.append(InputRule(path, None, 0))
        return tuple(rules)

    def _is_partial(self, name: str, parts: list[Tensor | None], expected: Tensor | None, upstream: bool) -> bool:
        """Whether the ranks' gradients must be summed; equal gradients need nothing."""
        known = next((part for part in [expected, *parts] if part is not None), None)
        if known is None:
            return False
        reference = torch.zeros_like(known) if expected is None else expected
        if all(agree(torch.zeros_like(known) if part is None else part, reference, self.floor) for part in parts):
            return False
        if upstream:
            raise RejectedError(f"the gradient of {name} would be summed twice: it also reaches the column linears")
        if not self._sums_to(parts, reference):
            raise RejectedError(f"the gradient of {name} differs")
        return True

    def _sums_to(self, parts: Sequence[Tensor | None], expected: Tensor | None) -> bool:
        known = [part for part in parts if part is not None]
        if not known:
            return expected is None or float(expected.abs().max()) <= 1e-4 * self.floor
        total = _sum(known)
        return agree(total, torch.zeros_like(total) if expected is None else expected, self.floor)


def _leaf_maker(leaves: dict[Path, Tensor]) -> Callable[[Path, Tensor], Tensor]:
    def make(path: Path, tensor: Tensor) -> Tensor:
        leaves[path] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return leaves[path]

    return make


def _cotangent(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _tail(output: Any, row_output: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The block's outputs that depend on the row's output, and their gradients with respect to it."""
    values, grads = [], []
    for tensor in tensors_in(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            (grad,) = torch.autograd.grad(tensor, row_output, _cotangent(tensor), allow_unused=True, retain_graph=True)
            if grad is not None:
                values.append(tensor.detach())
                grads.append(grad)
    return values, grads
