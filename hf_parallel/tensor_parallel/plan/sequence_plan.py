"""Find the parts of blocks that can run on parts of the sequence: proposed from the plan's pairs, proved by a run.

A region is a module that runs on the whole sequence: for each pair the innermost one that can be, so that its columns
share one gathered input and its row reduce-scatters. What is outside of all regions runs on a part. A proposal is
verified like a pair: the block runs whole and as all ranks, threads that really communicate, and outputs and gradients
must be equal. Parameters whose gradients are equal only when summed are marked. A block that does not verify runs on
the whole sequence, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import own_parameters
from hf_parallel.model.copies import deep_copy
from hf_parallel.model.stack import kind_of
from hf_parallel.model.tensors import map_tensors, tensors_in
from hf_parallel.tensor_parallel.plan.influence import Arguments, Block
from hf_parallel.tensor_parallel.plan.sequence_trace import HiddenFlow, plan_of_block, refusal, trace_stack
from hf_parallel.tensor_parallel.plan.trace import agree, capture_inputs, undisturbed
from hf_parallel.tensor_parallel.plan.verify_layer import RANK_TIMEOUT_S, RejectedError, cotangent
from hf_parallel.tensor_parallel.plan.virtual_ranks import run_sharded
from hf_parallel.tensor_parallel.shard_plan import BlockSequence, PairPlan, Place, Region, SequencePlan, TPPlan


Options = list[tuple[Region, ...]]


def shard_sequence(model: nn.Module, plan: TPPlan, sample: Mapping[str, Any]) -> TPPlan:
    """Add sequence parallelism to a plan.

    Pure, deterministic. Runs the model forward twice on `sample` and some blocks several times, in fp32 where the
    model is in half precision.

    Args:
        model: The full model with materialised weights that the plan was made for.
        plan: From `plan_tensor_parallel`.
        sample: Keyword arguments of a forward pass.

    Returns:
        The plan; blocks that run on the whole sequence say why.

    Raises:
        PlanError: The model's own code uses the hidden states between its blocks, or no block verifies.
    """
    sample = _long_enough(sample, plan.tp_size)
    with undisturbed(model):
        flow = trace_stack(model, plan, sample)
        kinds = {name: _kind(model, plan, flow, name) for name in flow.blocks}
        firsts = {kind: name for name, kind in reversed(kinds.items())}
        arguments = capture_inputs(model, sorted(firsts.values()), sample)
        verdicts = {kind: _judge(model, plan, flow, name, arguments[name]) for kind, name in firsts.items()}
    blocks = []
    for name, (given, returned) in flow.blocks.items():
        blocks.append(replace(verdicts[kinds[name]], name=name, inputs=given, outputs=returned))
    if all(block.whole for block in blocks):
        raise refusal(model, blocks[0].name, blocks[0].whole)
    return replace(plan, sequence=SequencePlan(flow.stack, flow.dim, flow.width, tuple(blocks)))


def _read_in(flow: HiddenFlow, name: str) -> tuple[tuple[str, Place], ...]:
    """Find what is read outside of a block beside its hidden states, by relative names."""
    prefix = f"{name}."
    return tuple((m.removeprefix(prefix), place) for m, place in flow.read if m.startswith(prefix))


def _is_part(block: BlockSequence, module: str, place: Place) -> bool:
    """Whether what a module of `block` returns at `place` is of a part of the sequence."""
    for region in block.regions:
        if module.startswith(f"{region.module}."):
            return False
        if module == region.module:
            return region.exit == "row" or place in region.outputs
    return True


def _long_enough(sample: Mapping[str, Any], tp_size: int) -> dict[str, Any]:
    """`sample` with its sequences repeated until every rank gets some of them."""
    ids = sample.get("input_ids")
    if not isinstance(ids, Tensor) or ids.shape[-1] >= 2 * tp_size:
        return dict(sample)
    length, times = ids.shape[-1], -(-2 * tp_size // ids.shape[-1])

    def repeated(value: Any) -> Any:
        along = isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == length
        return torch.cat([value] * times, 1) if along else value

    return {key: repeated(value) for key, value in sample.items()}


def _kind(model: nn.Module, plan: TPPlan, flow: HiddenFlow, name: str) -> tuple[Any, ...]:
    """Blocks of one kind share a verdict: equal class, shapes, settings, and parts of the plan."""
    return (
        kind_of(model.get_submodule(name)),
        repr(plan_of_block(plan, name)),
        flow.blocks[name],
        _read_in(flow, name),
    )


def _judge(model: nn.Module, plan: TPPlan, flow: HiddenFlow, name: str, arguments: Arguments) -> BlockSequence:
    """The regions of a block, or why it runs on the whole sequence."""
    given, returned = flow.blocks[name]
    whole = BlockSequence("", given, returned)
    try:
        block = Block.copied(model.get_submodule(name), {}, arguments)
        trial = _Trial(block, plan_of_block(plan, name), flow, name)
        return trial.best(whole)
    except RejectedError as rejection:
        return replace(whole, whole=str(rejection))
    except Exception as error:  # noqa: BLE001  unknown code may refuse to be copied or run alone; reported
        return replace(whole, whole=f"cannot be run alone: {type(error).__name__}: {str(error).strip()[:100]}")


@dataclass
class _Outcome:
    """Results of one run of a block, whole or as one rank."""

    outputs: list[Tensor]
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor | None]


class _Trial:
    """One block, and what is known about running it on parts of the sequence.

    Args:
        block: A copy of it.
        plan: Its part of the plan, by relative names.
        flow: Places of the hidden states.
        name: Name of the block in the model.
    """

    def __init__(self, block: Block, plan: TPPlan, flow: HiddenFlow, name: str) -> None:
        self.block, self.plan, self.flow = block, plan, flow
        self.given, self.read = flow.blocks[name][0], _read_in(flow, name)
        # Module -> where it gets tensors of the sequence, returns them as wide as the hidden states, and returns any.
        self.calls: dict[str, tuple[tuple[Place, ...], tuple[Place, ...], tuple[Place, ...]]] = {}
        self.compared: list[int] | None = None
        self.reference = self._run(deep_copy(block.module), note=True)
        self._leave_out_parts()
        grads = [grad for grad in self.reference.parameters.values() if grad is not None and grad.numel()]
        self.floor = 1e-2 * max((float(grad.abs().max()) for grad in grads), default=0.0)

    def _leave_out_parts(self) -> None:
        """Compare no output that is a part without sequence parallelism already: attention weights of own heads."""
        ranks = self._run_ranks(None)
        numbers = range(len(self.reference.outputs))
        kept = [i for i in numbers if all(_equal(rank.outputs[i], self.reference.outputs[i]) for rank in ranks)]
        if not kept:
            raise RejectedError("nothing that it returns is equal on all ranks")
        if len(kept) < len(self.reference.outputs):
            self.compared = kept
            self.reference = self._run(deep_copy(self.block.module))

    def best(self, whole: BlockSequence) -> BlockSequence:
        """`whole` with regions and partial parameters that verify, the smallest regions that do.

        Raises:
            RejectedError: None do; says why.
        """
        groups = self._groups()
        failure: RejectedError | None = None
        firsts = [options[0] for options in groups]
        lasts = [options[-1] for options in groups]
        for chosen in (firsts, lasts, [*lasts, *self._others(lasts)]):
            try:
                found = self._verified(whole, chosen)
            except RejectedError as rejection:
                failure = failure or rejection
                continue
            return found if chosen is firsts else self._smaller(whole, found, groups, chosen)
        raise failure or RejectedError("it has no sharded layer")

    def _smaller(
        self, whole: BlockSequence, found: BlockSequence, groups: Sequence[Options], chosen: list[tuple[Region, ...]]
    ) -> BlockSequence:
        for index, options in enumerate(groups):
            for option in options[:-1]:
                attempt = [*chosen[:index], option, *chosen[index + 1 :]]
                try:
                    found, chosen = self._verified(whole, attempt), attempt
                    break
                except RejectedError:
                    continue
        return found

    # -- proposals -----------------------------------------------------------------------------------------------

    def _groups(self) -> list[Options]:
        """List, for each part of the block with sharded layers, the ways to run it, the best first and the safest last."""
        pairs: dict[str, list[PairPlan]] = {}
        for pair in self.plan.pairs:
            pairs.setdefault(pair.root.partition(".")[0] or pair.row, []).append(pair)
        groups = [self._options(child, members) for child, members in pairs.items()]
        covered = {name for pair in self.plan.pairs for name in (*pair.columns, pair.row)}
        children = {name.partition(".")[0] for name in self.plan.linears if name not in covered} - set(pairs)
        groups += [self._splits(child) for child in sorted(children)]
        return [options for options in groups if options]

    def _options(self, child: str, pairs: list[PairPlan]) -> Options:
        options: Options = []
        entries = [list(self._entries(pair)) for pair in pairs]
        for position in range(max(map(len, entries)) if all(entries) else 0):
            chosen = [names[min(position, len(names) - 1)] for names in entries]
            regions = self._merged([(names, pair.row) for names, pair in zip(chosen, pairs, strict=True)])
            # a residual that a module adds after its row stays a part
            alone = [tuple(replace(r, inputs=r.inputs[i : i + 1] or r.inputs[-1:]) for r in regions) for i in (0, 1)]
            options += [option for option in (*alone, regions) if option not in options]
        if child in self.calls and all(pair.root for pair in pairs):
            given, returned, _ = self.calls[child]
            if given and returned and not any(self._has_bias(pair.row) for pair in pairs):
                options.append((Region(child, given, "sum", returned, tuple(pair.row for pair in pairs)),))
            options += self._splits(child)
        return [option for option in options if option]

    def _has_bias(self, row: str) -> bool:
        return own_parameters(self.block.module.get_submodule(row)).get("bias") is not None

    def _splits(self, child: str) -> Options:
        """Scores of a router are whole for who collects them, unless the block itself uses them."""
        given, *returned = self.calls.get(child, ((), (), ()))
        return [(Region(child, given, "split", places),) for places in dict.fromkeys(returned) if given and places]

    def _entries(self, pair: PairPlan) -> Iterator[tuple[str, ...]]:
        """Modules that could gather for a pair, the innermost first; several where each column gathers for itself."""
        if pair.row not in self.plan.linears:
            return
        columns = [name for name in pair.columns if self.plan.linears[name].entry]
        parents = {name.rpartition(".")[0] for name in columns}
        parts = pair.root.split(".")
        outer = [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
        names = [pair.root, *(parents if len(parents) == 1 else ()), *outer]
        for name in dict.fromkeys(names):
            if name and self.calls.get(name, ((), (), ()))[0]:
                yield (name,)
        if columns and all(self.calls.get(name, ((), (), ()))[0] for name in columns):
            yield tuple(columns)

    def _merged(self, wanted: Sequence[tuple[tuple[str, ...], str]]) -> tuple[Region, ...]:
        """One region a module, with the rows of all pairs that enter there."""
        rows: dict[str, list[str]] = {}
        for names, row in wanted:
            rows.setdefault(names[0], []).append(row)
            for name in names[1:]:
                rows.setdefault(name, [])
        nested = any(a != b and f"{a}.".startswith(f"{b}.") for a in rows for b in rows)
        if nested:
            return ()
        return tuple(Region(name, self.calls[name][0], "row", (), tuple(held)) for name, held in rows.items())

    def _others(self, chosen: Sequence[tuple[Region, ...]]) -> list[tuple[Region, ...]]:
        """Every other part of the block that has matrices: it may mix positions without a sharded layer."""
        taken = {region.module.partition(".")[0] for regions in chosen for region in regions}
        found = []
        for child, module in self.block.module.named_children():
            if child not in taken and any(p.ndim >= 2 for p in module.parameters()):
                found += self._splits(child)[-1:]
        return found

    # -- proof ---------------------------------------------------------------------------------------------------

    def _verified(self, whole: BlockSequence, chosen: Sequence[tuple[Region, ...]]) -> BlockSequence:
        proposal = replace(whole, regions=tuple(region for regions in chosen for region in regions))
        for module, place in self.read:
            if _is_part(proposal, module, place):
                raise RejectedError(f"what {module} returns is read outside of the block")
        partial = self._partial(self._run_ranks(proposal))
        if not partial:
            return proposal
        proposal = replace(proposal, partial=partial)
        if self._partial(self._run_ranks(proposal)):
            raise RejectedError("gradients that are summed over the ranks do not equal the whole ones")
        return proposal

    def _run_ranks(self, proposal: BlockSequence | None) -> list[_Outcome]:
        """Run the block as all ranks would; without sequence parallelism if there is no proposal."""
        plan = self.plan
        if proposal is not None:
            flow = self.flow
            plan = replace(plan, sequence=SequencePlan(flow.stack, flow.dim, flow.width, (proposal,)))
        try:
            return run_sharded(lambda: deep_copy(self.block.module), plan, RANK_TIMEOUT_S, self._run)
        except Exception as error:  # the block's own code, run on parts, may raise anything
            raise RejectedError(f"raises {type(error).__name__}: {str(error).strip()[:150].rstrip('.')}") from error

    def _run(self, module: nn.Module, *, note: bool = False) -> _Outcome:
        leaves: list[Tensor] = []

        def leaf(_: Place, tensor: Tensor) -> Tensor:
            leaves.append(tensor.detach().clone().requires_grad_(tensor.requires_grad))
            return leaves[-1]

        args, kwargs = (map_tensors(leaf, part) for part in self.block.arguments)
        handles = self._watch(module) if note else []
        try:
            with torch.enable_grad():
                output = module(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        outputs = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
        outputs = outputs if self.compared is None else [outputs[i] for i in self.compared]
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        learned = [tensor for tensor in leaves if tensor.requires_grad]
        total = torch.stack([(tensor * cotangent(tensor)).sum() for tensor in outputs]).sum()
        grads = torch.autograd.grad(total, [*parameters.values(), *learned], allow_unused=True)
        return _Outcome(
            [tensor.detach() for tensor in outputs],
            list(grads[len(parameters) :]),
            dict(zip(parameters, grads[: len(parameters)], strict=True)),
        )

    def _watch(self, module: nn.Module) -> list[Any]:
        """Note where the modules of the block get and return tensors of the whole sequence."""
        dim = self.flow.dim
        hidden: list[Tensor] = []
        for part in self.block.arguments:
            map_tensors(lambda place, x: hidden.append(x) if place in self.given else x, part)
        shape = hidden[0].shape

        def sequences(value: Any, width: int | None = None) -> tuple[Place, ...]:
            found: list[Place] = []

            def see(place: Place, x: Tensor) -> Tensor:
                folded = dim == 1 and x.ndim == 2 and x.shape[0] == shape[0] * shape[1]
                along = folded or (x.ndim == len(shape) and x.shape[: dim + 1] == shape[: dim + 1])
                if x.requires_grad and along and width in (None, x.shape[-1]):
                    found.append(place)
                return x

            map_tensors(see, value)
            return tuple(found)

        def record(name: str) -> Any:
            def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                given = sequences(args) + sequences(kwargs)
                self.calls.setdefault(name, (given, sequences(output, shape[-1]), sequences(output)))

            return hook

        return [
            part.register_forward_hook(record(name), with_kwargs=True) for name, part in module.named_modules() if name
        ]

    def _partial(self, ranks: Sequence[_Outcome]) -> tuple[str, ...]:
        """Parameters whose gradients are equal to the whole ones only when summed.

        Raises:
            RejectedError: Something differs.
        """
        for outcome in ranks:
            for kind, mine, whole in (
                ("output", outcome.outputs, self.reference.outputs),
                ("gradient of the input", outcome.inputs, self.reference.inputs),
            ):
                if len(mine) != len(whole) or not all(map(_equal, mine, whole)):
                    raise RejectedError(f"the {kind} differs")
        specs = self.plan.shard_specs()
        partial = []
        for name, whole_grad in self.reference.parameters.items():
            parts = [outcome.parameters[name] for outcome in ranks]
            if name in specs:
                full = self.block.module.get_parameter(name)
                expected = torch.zeros_like(full) if whole_grad is None else whole_grad
                for rank, part in enumerate(parts):
                    own = specs[name].shard(expected, self.plan.tp_size, rank)
                    if not agree(torch.zeros_like(own) if part is None else part, own, self.floor):
                        raise RejectedError(f"the gradient of {name} differs")
            elif self._is_partial(name, parts, whole_grad):
                partial.append(name)
        return tuple(partial)

    def _is_partial(self, name: str, parts: list[Tensor | None], whole: Tensor | None) -> bool:
        zero = torch.zeros_like(self.block.module.get_parameter(name))
        expected = zero if whole is None else whole
        values = [zero if part is None else part for part in parts]
        if all(agree(value, expected, self.floor) for value in values):
            return False
        if not agree(torch.stack(values).sum(0), expected, self.floor):
            raise RejectedError(f"the gradient of {name} differs")
        return True


def _equal(mine: Tensor | None, whole: Tensor | None) -> bool:
    if mine is None or whole is None:
        return mine is whole
    return agree(mine, whole)
