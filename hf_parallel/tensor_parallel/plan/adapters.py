"""Plans the adapters (LoRA) on sharded linear layers: what ranks store of them follows from the layers they are on.

A tuner layer is one linear layer, `x W^T + s (x A^T) B^T`. Where the ranks have the outputs of W, they have those of B and all
of A; where they have the inputs of W, they have those of A and all of B. What they have all of is used in parts, which the
proof of the pair finds by itself. Adapters on layers without a pair stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from hf_parallel.compat.private_peft import tuner_layers
from hf_parallel.compat.private_torch import own_parameters
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.plan.propose import Proposal
from hf_parallel.tensor_parallel.shard_plan import LinearPlan


def parts_of_adapters(model: nn.Module) -> frozenset[str]:
    """Names of the modules that belong to adapters: no layers of the model itself."""
    inside = set()
    for name, layer in tuner_layers(model).items():
        base = f"{name}.base_layer" if name else "base_layer"
        for inner, _ in layer.named_modules(prefix=name):
            if inner != name and inner != base and not inner.startswith(f"{base}."):
                inside.add(inner)
    return frozenset(inside)


def adapter_plans(model: nn.Module, plans: Mapping[str, LinearPlan]) -> dict[str, LinearPlan]:
    """The sharded factors of the adapters on the layers `plans`; names are relative to `model`, as those of `plans`."""
    found = {}
    for name, layer in tuner_layers(model).items():
        base = plans.get(f"{name}.base_layer")
        if base is None or base.role not in ("column", "row", "reduce"):
            continue
        sections = base.weight.sections
        for adapter, second in getattr(layer, "lora_B", {}).items():
            if base.role == "column":
                bias = None if own_parameters(second).get("bias") is None else ShardSpec(0, sections)
                plan = LinearPlan("column", False, ShardSpec(0, sections), bias, False, base.take)
                found[f"{name}.lora_B.{adapter}"] = plan
            else:
                found[f"{name}.lora_A.{adapter}"] = LinearPlan("row", False, ShardSpec(1, sections), None, False)
    return found


def with_adapters(model: nn.Module, proposal: Proposal) -> Proposal:
    """The proposal with the adapters on its layers; `model` is the root of its pair."""
    plans = adapter_plans(model, proposal.linears)
    if not plans:
        return proposal
    second = [name.replace(".lora_A.", ".lora_B.") for name, plan in plans.items() if plan.role == "row"]
    added = [f"{name}.bias" for name in second if own_parameters(model.get_submodule(name)).get("bias") is not None]
    pair = replace(proposal.pair, scaled=(*proposal.pair.scaled, *added))
    return Proposal(proposal.linears | plans, pair)
