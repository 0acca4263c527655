"""The ledger: one entry a tensor, the same on every rank, with all its names and holders."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_parallel.errors import PlanError, UnsupportedError
from hf_parallel.ledger import Ledger, build_ledger
from hf_parallel.tensor_parallel.layout import ShardSpec


def stage_of(name: str) -> int:
    """Two stages: blocks 0 and 1 with the embedding, blocks 2 and 3 with norm and head."""
    return 0 if "embed_tokens" in name or ".layers.0." in name or ".layers.1." in name else 1


def two_stages(model: nn.Module, specs: dict[str, ShardSpec] | None = None) -> Ledger:
    return build_ledger(model, pp_size=2, holds=lambda stage, name: stage == stage_of(name), specs=specs or {})


def test_every_parameter_is_one_entry_in_module_order() -> None:
    model = tiny.llama()
    ledger = two_stages(model)
    assert [entry.name for entry in ledger if entry.kind == "param"] == [name for name, _ in model.named_parameters()]
    for entry in ledger:
        assert entry.shape == tuple(model.get_parameter(entry.name).shape)
        assert entry.holders == (stage_of(entry.name),) == (entry.owner,)
        assert entry.used
    assert ledger.shared_holders() == []


def test_a_tied_parameter_is_one_entry_with_two_names_and_two_holders() -> None:
    ledger = two_stages(tiny.llama(tied=True))
    entry = ledger.find("lm_head.weight")
    assert entry is ledger.find("model.embed_tokens.weight")
    assert entry.name == "model.embed_tokens.weight"
    assert (entry.holders, entry.owner) == ((0, 1), 0)
    assert ledger.shared_holders() == [(0, 1)]
    assert all(ledger.holds(stage, name) for stage in (0, 1) for name in entry.aliases)
    assert not ledger.holds(1, "model.layers.0.mlp.up_proj.weight")
    assert {e.name for e in ledger.held_by(0)} & {e.name for e in ledger.held_by(1)} == {entry.name}


def test_a_parameter_that_no_stage_reads_is_kept_by_the_first_for_the_checkpoint() -> None:
    model = tiny.llama()
    model.register_parameter("unread", nn.Parameter(torch.zeros(3)))
    ledger = build_ledger(
        model, pp_size=2, holds=lambda stage, name: name != "unread" and stage == stage_of(name), specs={}
    )
    entry = ledger.find("unread")
    assert (entry.holders, entry.used) == ((0,), False)


def test_a_tensor_is_saved_under_the_name_that_the_state_dict_has_for_it() -> None:
    model = tiny.llama(tied=True)
    plain = two_stages(model)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    ledger = two_stages(model)
    assert ledger.names == plain.names == tuple(model.state_dict())
    (entry,) = {ledger.find(name) for name in ledger.names if name.endswith("layers.0.mlp.up_proj.weight")}
    assert entry.aliases == (entry.name,) == ("model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",)
    assert entry.state_names == ("model.layers.0.mlp.up_proj.weight",)
    assert ledger.find("lm_head.weight").state_names == ("model.embed_tokens.weight", "lm_head.weight")


def test_a_state_dict_with_other_tensors_is_refused() -> None:
    model = tiny.llama()

    def doubled(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
        state[f"{prefix}gate_proj.weight"] = 2 * state[f"{prefix}gate_proj.weight"]

    model.model.layers[1].mlp.register_state_dict_post_hook(doubled)
    with pytest.raises(UnsupportedError, match=r"another tensor than .* model\.layers\.1\.mlp\.gate_proj\.weight"):
        two_stages(model)


def test_a_state_dict_with_more_tensors_is_refused() -> None:
    model = tiny.llama()
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.update(steps=torch.zeros(())))
    with pytest.raises(
        UnsupportedError, match=r"has steps, which is no parameter or buffer .* Register it as a buffer"
    ):
        two_stages(model)


def test_only_persistent_buffers_are_entries() -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.zeros(2))
    model.register_buffer("made", torch.zeros(2), persistent=False)
    ledger = build_ledger(model, pp_size=1, holds=lambda stage, name: True, specs={})
    assert [(entry.name, entry.kind) for entry in ledger] == [("kept", "buffer")]
    assert [entry for entry in ledger.held_by(0) if entry.kind == "param"] == []


def test_a_tied_parameter_with_two_layouts_is_refused() -> None:
    specs = {"lm_head.weight": ShardSpec.contiguous(0, tiny.VOCAB)}
    with pytest.raises(
        PlanError, match=r"model\.embed_tokens\.weight, lm_head\.weight are one tied .*Shard all of them"
    ):
        two_stages(tiny.llama(tied=True), specs)
    specs["model.embed_tokens.weight"] = specs["lm_head.weight"]
    assert two_stages(tiny.llama(tied=True), specs).find("lm_head.weight").spec is not None


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(PlanError, match=r"extra was added to the model after"):
        two_stages(tiny.llama()).find("extra")


def test_the_fingerprint_sees_names_shapes_dtypes_holders_and_layouts() -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    renamed = tiny.llama()
    renamed.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    ledgers = [
        two_stages(tiny.llama()),
        two_stages(tiny.llama(tied=True)),
        two_stages(tiny.llama(layers=3)),
        two_stages(tiny.llama().bfloat16()),
        two_stages(tiny.llama(), {name: ShardSpec.contiguous(0, 64)}),
        two_stages(tiny.llama(), {name: ShardSpec.contiguous(1, 32)}),
        build_ledger(tiny.llama(), pp_size=2, holds=lambda stage, name: stage == 0, specs={}),
        two_stages(renamed),
    ]
    assert len({ledger.fingerprint() for ledger in ledgers}) == len(ledgers)
    assert two_stages(tiny.llama()).fingerprint() == ledgers[0].fingerprint()
