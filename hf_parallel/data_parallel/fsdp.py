"""ZeRO stages 2 and 3 by torch's `fully_shard` (FSDP2): parameters, gradients and optimizer state in parts.

Between steps each rank holds its rows of every parameter, as a `DTensor`. A block's parameters are gathered when the
block runs and given up after it; its gradients are reduce-scattered, and averaged, during the backward pass. Everything
here is about what `fully_shard` leaves open: which modules are gathered together, in which precision, and what becomes of an
optimizer that was made before.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5: P_os+g+p; Zhao et al. 2023 (arXiv:2304.11277).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_parallel.compat.private_collectives import count_traffic
from hf_parallel.compat.private_dtensor import (
    exchangeable_data_of_parts,
    explain_refusals_of_parts,
    explained_calls,
    mark_rows_of_parts,
    whole_draws_of_parts,
    whole_indices_of_parts,
    whole_numbers_of_parts,
)
from hf_parallel.compat.private_dtensor_changes import note_changes_of_parts
from hf_parallel.compat.private_dtensor_losses import (
    gradients_in_parts,
    join_parts_and_plain_tensors,
    mean_gradients_of_wholes,
    note_numbers_of_losses,
)
from hf_parallel.compat.private_fsdp import HookCarrier, keep_class_name
from hf_parallel.compat.private_torch import own_parameters
from hf_parallel.data_parallel.flat import refuse_overlaps
from hf_parallel.data_parallel.fsdp_moves import refuse_moves
from hf_parallel.data_parallel.fsdp_parts import CopiedRows, KeptPart, is_part, local_of, split_state
from hf_parallel.data_parallel.gathered import Gathered
from hf_parallel.data_parallel.loss_numbers import NUMBERS
from hf_parallel.errors import UnsupportedError


HALF = (torch.bfloat16, torch.float16)


class ShardedModel:
    """A model whose parameters are kept in parts; made in place, before an engine looks at the parameters.

    Half-precision parameters become fp32: the optimizer updates fp32 parts, and a pass gathers what was there before. Those of a
    model of which nothing is trained stay as they are.

    Args:
        model: Whole, or already sharded over tensor-parallel ranks; the same on every rank of the groups.
        units: Names of the modules of each unit: they run one after the other and are gathered at once, when the first
            begins or a gradient reaches the last. The rest is gathered with the model.
        shard_group: Ranks that share one copy of the parameters; at least two.
        replicate_group: Ranks with the same part in other copies; None if there is one copy.
        stage: 3 gives a unit's parameters up after its forward pass, 2 keeps them until its backward pass.
        device: Device of the model.
        offload: "pinned" or "pageable" host memory for the parts; "none" leaves them on the device.
        compute_dtype: Autocast dtype of the forward pass; None without autocast.

    Attributes:
        parts: A module of each unit that is gathered by itself, the model last.
        has_copies: Whether parts are fp32 copies of half-precision parameters.

    Raises:
        UnsupportedError: Parameters of several dtypes, or one that is a single number.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Sequence[str]],
        shard_group: dist.ProcessGroup,
        replicate_group: dist.ProcessGroup | None = None,
        *,
        stage: int,
        device: torch.device,
        offload: Literal["none", "pageable", "pinned"] = "none",
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        _teach_parts()
        NUMBERS.take()  # of another model, if its training failed
        self.model, self.device, self.offload = model, device, offload != "none"
        before = dict(model.named_parameters(remove_duplicate=False))
        refuse_overlaps([(name, parameter) for name, parameter in before.items() if parameter.requires_grad])
        own = _one_dtype(before)
        self._trains = any(parameter.requires_grad for parameter in before.values())
        self.has_copies = own in HALF and self._trains
        mesh = _device_mesh(shard_group, replicate_group, device)
        policy = CPUOffloadPolicy(pin_memory=offload == "pinned") if self.offload else OffloadPolicy()
        self.parts: list[FSDPModule] = []
        for modules in [*self_contained(model, units).values(), [model]]:
            is_root = modules == [model]
            with _prepared(modules, widens=self.has_copies):
                self.parts += fully_shard(
                    modules,
                    mesh=mesh,
                    reshard_after_forward=None if is_root and stage == 3 else stage == 3,
                    mp_policy=precision(own, compute_dtype, is_root or _takes_one_dtype(modules, device)),
                    offload_policy=policy,
                )[:1]
            for module in modules:
                keep_class_name(module)
        self.sent_bytes = 0
        self._install_hooks(replicates=replicate_group is not None)
        self._follow_parameters(before)
        refuse_moves(model)

    def _install_hooks(self, *, replicates: bool) -> None:
        for part in self.parts:
            count_traffic(part, self._count, replicates=replicates)
        for name, module in self.model.named_modules():
            if any(parameter is not None for parameter in own_parameters(module).values()):
                _NAMES[module] = name
                module.register_forward_pre_hook(_refuse_parts)
        # Behind that of `fully_shard`, which keeps the root's gathered.
        self.model.register_forward_hook(self._after_forward)
        self.model.register_forward_pre_hook(self._before_forward, prepend=True)
        weakref.finalize(
            self, register_optimizer_step_pre_hook(_calling(weakref.WeakMethod(self._refuse_replaced))).remove
        )

    def _follow_parameters(self, before: dict[str, nn.Parameter]) -> None:
        """Know the parameters that `fully_shard` made in place of those before, which hand over attributes and hooks."""
        after = dict(self.model.named_parameters(remove_duplicate=False))
        self._replaced = {id(old): (weakref.ref(old), after[name]) for name, old in before.items()}
        self._parameters = list(after.values())
        self._has_gathered = False
        self._hooks = HookCarrier(self.parts)
        self._gathered = Gathered(self._hooks)
        self._gradient_nodes: list[object] = []
        for parameter in self._parameters:
            if is_part(parameter):
                parameter.__class__ = KeptPart  # type: ignore[assignment]
                if parameter.is_floating_point():
                    self._gradient_nodes.append(gradients_in_parts(parameter))
        for name, old in before.items():
            if old is not after[name]:
                self._take_over(old, after[name])

    def _take_over(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Give a parameter that `fully_shard` made the attributes and hooks of the one that it replaces."""
        vars(new).update({key: value for key, value in vars(old).items() if key not in vars(new)})
        self._hooks.adopt(new, old)

    def _count(self, num_bytes: int) -> None:
        self.sent_bytes += num_bytes

    def begin_forward(self) -> None:
        """Prepare a training forward pass: hooks registered since run in its backward pass."""
        self._gathered.hide()
        for part in self._hooks.accumulating():
            if part.grad is not None:
                raise UnsupportedError(
                    f"the hook on the accumulated gradient of {_name_of(part)} (register_post_accumulate_grad_hook) with zero.stage: 3 or "
                    "engine: fsdp2 would see the gradient of this backward pass only: that of earlier passes is averaged over the "
                    "replicas already. Use parameter.register_hook, or set gradient_accumulation_steps to 1, or zero.stage to 1."
                )
        self._hooks.follow()

    def begin_backward(self) -> None:
        """Let gathered parameters have the gradients that arrive, as backward passes begin."""
        self._gathered.hide()

    def _before_forward(self, model: nn.Module, args: object) -> None:
        """Make the memory of gathers outside of `inference_mode`, whose tensors autograd refuses; `fully_shard` keeps the first."""
        if torch.is_inference_mode_enabled() and not self._has_gathered:
            with torch.inference_mode(mode=False), torch.no_grad():
                for part in self.parts:
                    part.unshard()
                    part.reshard()
        self._has_gathered = True

    def _after_forward(self, model: nn.Module, args: object, output: object) -> None:
        """Give `model.parameters()` the sharded parameters again after an evaluation, and what is gathered its gradient."""
        if not (torch.is_grad_enabled() and self._trains):
            self.reshard()
            return
        self._gathered.show()

    def reshard(self) -> None:
        """Give up what a forward pass without a backward pass left gathered: it would not follow updates."""
        for part in self.parts:
            part.reshard()

    def zero_grad(self) -> None:
        """Forget the gradients of this rank's parts."""
        for parameter in self._parameters:
            parameter.grad = None

    def take_over(self, optimizer: Optimizer) -> None:
        """Give an optimizer that was made before the parts in place of the parameters, with the state it has of these."""
        for group in optimizer.param_groups:
            group["params"] = [self.now(parameter) for parameter in group["params"]]
        for old in list(optimizer.state):
            new = self.now(old)
            if new is not old:
                optimizer.state[new] = split_state(new, optimizer.state.pop(old))
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.reshard()

    def _refuse_replaced(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Refuse an optimizer of the parameters from before: its steps would change nothing.

        Raises:
            UnsupportedError: It was not prepared.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if self.now(parameter) is not parameter:
                    raise UnsupportedError(
                        f"{type(optimizer).__name__} was made before the model was prepared and was not prepared with it: with zero.stage: 3 "
                        "or engine: fsdp2 the model has other parameters since. Pass it to accelerator.prepare(), or make it of the "
                        "prepared model's parameters."
                    )

    def gathered_of(self, part: Tensor) -> Tensor | None:
        """The gathered parameter that modules have in place of a part; None before the part was gathered for the first time."""
        gathered: Tensor | None = self._hooks.gathered_of(part)
        return gathered

    def now(self, parameter: Tensor) -> Tensor:
        """The parameter that the model has in place of one from before, or that one itself."""
        reference, new = self._replaced.get(id(parameter), (lambda: None, parameter))
        return new if reference() is parameter else parameter


def _calling(method: weakref.WeakMethod[Callable[..., None]]) -> Callable[..., None]:
    """A hook that lasts as long as the method's object does."""

    def hook(*args: object) -> None:
        bound = method()
        if bound is not None:
            bound(*args)

    return hook


# Not an argument of the hook: blocks that differ in it would each be compiled by themselves.
_NAMES: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def _refuse_parts(module: nn.Module, args: object) -> None:
    """Refuse to run a module whose parameters no unit has gathered.

    Raises:
        UnsupportedError: They are in parts, so that this is a call from outside of the model's forward.
    """
    for key, parameter in own_parameters(module).items():
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"zero.stage=3 (or 2 with zero.engine=fsdp2): module {_NAMES[module]} was called outside of the model's "
                f"forward, where its {key} is sharded over {parameter.device_mesh.size()} replicas and not gathered. Call it inside of the "
                "model's forward (pass input_ids in place of inputs_embeds made from the embedding), or set zero.stage to 1."
            )


def _name_of(part: Tensor) -> str | None:
    """The parameter whose part, or whose gradient's part, lies in the memory of a tensor."""
    memory = local_of(part).untyped_storage().data_ptr()
    for module, prefix in _NAMES.items():
        for key, parameter in own_parameters(module).items():
            for one in (parameter, None if parameter is None else parameter.grad):
                if isinstance(one, DTensor) and local_of(one).untyped_storage().data_ptr() == memory:
                    return f"{prefix}.{key}".removeprefix(".")
    return None


def _counts(part: Any) -> bool:
    """Whether a change of a part does: all ranks have rows of it, and it is code of users that changes it."""
    ranks, rows = part.device_mesh.size(-1), part.shape[0] if part.ndim else 0
    return not NUMBERS.in_step and bool(rows > -(-rows // ranks) * (ranks - 1))


def _teach_parts() -> None:
    """Teach torch's parts of a tensor what user code does with parameters, or to say why it cannot be done."""
    whole_numbers_of_parts()
    exchangeable_data_of_parts()
    mark_rows_of_parts(CopiedRows)
    whole_draws_of_parts()
    whole_indices_of_parts()
    explain_refusals_of_parts(_name_of)
    note_numbers_of_losses(NUMBERS.note)
    join_parts_and_plain_tensors(NUMBERS.note)
    note_changes_of_parts(_counts, NUMBERS.note_change)
    mean_gradients_of_wholes()


def explained(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which calls code of users, made to say by parameter what torch cannot compute from parts."""
    return explained_calls(call, _name_of)


def _takes_one_dtype(modules: Sequence[nn.Module], device: torch.device) -> bool:
    """Whether norms in these modules refuse weights in another dtype than their inputs: autocast on a CPU leaves them alone."""
    norms = (nn.LayerNorm, nn.GroupNorm)
    return device.type == "cpu" and any(isinstance(inner, norms) for module in modules for inner in module.modules())


def precision(own: torch.dtype, compute: torch.dtype | None, stays: bool) -> MixedPrecisionPolicy:
    """The precision in which parameters are gathered; gradients are summed in fp32.

    Under autocast the matrices of a unit are gathered in the dtype that autocast would give them. What is gathered with the
    model (embedding, last norm, head) stays fp32, so that hidden states keep the precision they have under autocast; so do
    units that could not compute otherwise.

    Args:
        own: Dtype of the model's parameters.
        compute: Autocast dtype of the forward pass; None without autocast.
        stays: Whether parameters in fp32 are gathered so.
    """
    gathered = own if own in HALF else None if stays or own != torch.float32 else compute
    reduced = None if gathered is None else torch.float32
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)


def self_contained(model: nn.Module, units: Sequence[Sequence[str]]) -> dict[tuple[str, ...], list[nn.Module]]:
    """Choose the `units` that have parameters, none of which is part of another unit or of the rest as well.

    A unit stays together: the gradient that reaches its last module must find the parameters of all, because they may be
    run again from there.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {}
    for unit in units:
        modules = [model.get_submodule(name) for name in unit]
        held = [name for module in modules for parameter in module.parameters() for name in names[id(parameter)]]
        if held and all(name.startswith(tuple(f"{one}." for one in unit)) for name in held):
            found[tuple(unit)] = modules
    return found


def _device_mesh(
    shard_group: dist.ProcessGroup, replicate_group: dist.ProcessGroup | None, device: torch.device
) -> DeviceMesh:
    """(dp_shard) or (dp_replicate, dp_shard) around this rank, on groups that exist."""
    shard = dist.get_process_group_ranks(shard_group)
    if replicate_group is None:
        return DeviceMesh.from_group(shard_group, device.type, mesh_dim_names=("dp_shard",))
    # Parts of a copy are neighbours, equally far from each other in every copy.
    first = dist.get_process_group_ranks(replicate_group)
    offsets = [rank - dist.get_rank() for rank in shard]
    ranks = [[rank + offset for offset in offsets] for rank in first]
    names = ("dp_replicate", "dp_shard")
    return DeviceMesh.from_group([replicate_group, shard_group], device.type, mesh=ranks, mesh_dim_names=names)


def _one_dtype(parameters: Mapping[str, nn.Parameter]) -> torch.dtype:
    """The dtype of all parameters.

    Raises:
        UnsupportedError: There are several, or a parameter cannot be cut into rows.
    """
    by_dtype: dict[torch.dtype, str] = {}
    for name, parameter in parameters.items():
        by_dtype.setdefault(parameter.dtype, name)
        if parameter.ndim == 0:
            raise UnsupportedError(
                f"zero.engine=fsdp2: parameter {name} is a single number (shape ()), which has no rows to shard. Give it "
                "the shape (1,), or set zero.engine to native and zero.stage to 1 or 2."
            )
    if len(by_dtype) > 1:
        shown = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in by_dtype.items())
        raise UnsupportedError(
            f"zero.engine=fsdp2: parameters have {len(by_dtype)} dtypes ({shown}): what is gathered together has one. Load "
            "the model in one dtype, or set zero.engine to native and zero.stage to 1 or 2."
        )
    return next(iter(by_dtype), torch.float32)


@contextmanager
def _prepared(modules: Sequence[nn.Module], *, widens: bool) -> Iterator[None]:
    """Inside, the parameters that are not sharded yet are contiguous, and fp32 where the optimizer needs it.

    Those from before are referred to as long as others are sharded: in fp32 they would be the whole model.
    """
    given = {p: p.data for module in modules for p in module.parameters() if not isinstance(p, DTensor)}
    for parameter, data in given.items():
        parameter.data = (data.float() if widens else data).contiguous()
    try:
        yield
    finally:
        for parameter, data in given.items():
            parameter.data = data
