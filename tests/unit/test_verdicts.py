"""A verdict is remembered only for a model that runs in the same way; whatever could change that makes it another one, or none."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_parallel.engine.plan import verdicts as verdicts_module
from hf_parallel.engine.plan.verdicts import Verdicts, cache_folder, verdicts_of
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.model.dropout import NoDropout
from hf_parallel.model.identity import UnknownError, digest_of_batch, identity_of
from hf_parallel.settings.config import HFParallelConfig


SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32},
}


def llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES | options))


@functools.cache
def usual() -> str:
    return identity_of(llama())


def test_weights_do_not_matter_and_the_number_is_stable() -> None:
    assert usual() == identity_of(llama()) == identity_of(llama(seed=1))


TELLS = """
import hf_parallel.engine.session
from test_verdicts import identity_of, llama
print(identity_of(llama()))
"""


def test_the_number_is_the_same_in_all_processes_of_a_script() -> None:
    """Classes are in other places there, and sets of them in another order."""
    command = [sys.executable, "-c", TELLS]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    ]
    one, other = [each.communicate(timeout=120)[0].split()[-1] for each in started]
    assert one == other


def test_trained_weights_are_told_from_constant_ones() -> None:
    model = llama()
    nn.init.zeros_(model.model.layers[0].mlp.up_proj.weight)
    assert identity_of(model) != usual()


@pytest.mark.parametrize(
    "options",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"attn_implementation": "eager"},
        {"attention_dropout": 0.1},
        {"tie_word_embeddings": True},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-5},
        {"num_hidden_layers": 3},
        {"num_key_value_heads": 1},
    ],
)
def test_another_config_is_another_model(options: dict[str, Any]) -> None:
    assert identity_of(llama(**options)) != usual()


def half(model: Any) -> None:
    model.bfloat16()


def frozen(model: Any) -> None:
    model.model.norm.weight.requires_grad_(False)


def evaluated(model: Any) -> None:
    model.model.layers[1].eval()


def scaled(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.5


def settled(model: Any) -> None:
    model.config.rms_norm_eps = 0.25


def tied_by_hand(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable()


def reordered(model: Any) -> None:
    blocks = list(model.model.layers)
    model.model.layers = nn.ModuleList(reversed(blocks))


def other_loss(model: Any) -> None:
    from transformers.loss.loss_utils import ForQuestionAnsweringLoss

    model.loss_function = ForQuestionAnsweringLoss


def stock_method_of_another_class(model: Any) -> None:
    kind = type(model.model.layers[0].mlp)
    model.model.layers[0].mlp.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "scale": 2})


@pytest.mark.parametrize(
    "change",
    [half, frozen, evaluated, scaled, settled, tied_by_hand, checkpointed, reordered, other_loss, stock_method_of_another_class],
)  # fmt: skip
def test_a_changed_model_is_another_one(change: Callable[[Any], None]) -> None:
    model = llama()
    change(model)
    with contextlib.suppress(UnknownError):
        assert identity_of(model) != usual()


def own(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError


def hooked(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *args: None)


def hooked_everywhere(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nn.modules.module._global_forward_hooks, -1, own)


def patched_instance(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.forward = own


def patched_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", own)


def patched_disguised(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", functools.wraps(modeling_llama.LlamaMLP.forward)(own))


def patched_helper(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Liger does."""
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)


def patched_class_by_name(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", type("LlamaRMSNorm", (nn.Module,), {"forward": own}))


def patched_far_helper(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_attention, "repeat_kv", own)


def patched_mask(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", own)


def patched_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", own)


def patched_torch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", own)


def test_checkpointing_of_transformers_is_known_by_how_it_is_set() -> None:
    made = []
    for options in ({}, {}, {"every_n_layers": 2}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}):
        model = llama()
        model.gradient_checkpointing_enable(**options)
        made.append(identity_of(model))
    assert made[0] == made[1]  # though the hook on the embedding has another number
    assert len({*made, usual()}) == 4


def patched_method_of_tensors(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "transpose", own)


def patched_loss(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.loss_function = own


def patched_cross_entropy(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "cross_entropy", own)


def patched_linear(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", own)


def own_object(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.adapter = types.SimpleNamespace(scale=object())


def subclass(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.__class__ = type("Mine", (LlamaForCausalLM,), {"__module__": __name__})


def edited_code(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function = modeling_llama.rotate_half
    instructions = function.__code__.replace(co_consts=tuple(3 if c == 2 else c for c in function.__code__.co_consts))
    assert instructions != function.__code__
    monkeypatch.setattr(function, "__code__", instructions)


def edited_default(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.apply_rotary_pos_emb, "__defaults__", (2,))


CHANGES = [
    *(hooked, hooked_everywhere, patched_instance, patched_class, patched_disguised, patched_helper, patched_class_by_name, patched_far_helper),
    *(patched_mask, patched_attention, patched_torch, patched_method_of_tensors, patched_loss, patched_cross_entropy),
    *(patched_linear, own_object, subclass),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_remembered_of_code_of_somebody_else(
    change: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    change(model, monkeypatch)
    with pytest.raises(UnknownError):
        identity_of(model)


@pytest.mark.parametrize("change", [edited_code, edited_default])
def test_edited_code_of_a_library_is_other_code(
    change: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    usual()
    change(model, monkeypatch)
    assert identity_of(model) != usual()


def test_nothing_is_remembered_while_a_mode_of_torch_is_entered() -> None:
    with NoDropout(), pytest.raises(UnknownError):
        identity_of(llama())


def test_values_of_a_batch_matter() -> None:
    ids = torch.arange(6).view(2, 3)
    one = digest_of_batch({"input_ids": ids, "use_cache": False})
    assert one == digest_of_batch({"use_cache": False, "input_ids": ids.clone()})
    others = [{"input_ids": ids + 1}, {"input_ids": ids.view(3, 2)}, {"input_ids": ids.float()}, {"labels": ids}]
    assert len({one, *(digest_of_batch(other | {"use_cache": False}) for other in others)}) == 5
    with pytest.raises(UnknownError):
        digest_of_batch({"image": object()})


def verdicts(tmp_path: Path, about: str = "a") -> Verdicts:
    return Verdicts(tmp_path / "cache", lambda: about)


def test_what_is_put_is_there_for_the_same_question_only(tmp_path: Path) -> None:
    verdicts(tmp_path).put("cut", True, "bounds")
    assert verdicts(tmp_path).get("cut", "bounds") is True
    assert verdicts(tmp_path).get("cut", "others") is None
    assert verdicts(tmp_path).get("loss", "bounds") is None
    assert verdicts(tmp_path, "b").get("cut", "bounds") is None


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"key": 1}', '{"key": "x", "verdict": true}', "\x00\xff"])
def test_a_damaged_file_is_as_none(content: str, tmp_path: Path) -> None:
    verdicts(tmp_path).put("cut", True)
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_bytes(content.encode("latin-1"))
    assert verdicts(tmp_path).get("cut") is None
    verdicts(tmp_path).put("cut", True)
    assert verdicts(tmp_path).get("cut") is True


def test_a_file_of_another_question_is_not_taken(tmp_path: Path) -> None:
    verdicts(tmp_path).put("cut", True, "one")
    (file,) = (tmp_path / "cache").rglob("*.json")
    verdicts(tmp_path).put("cut", True, "other")
    (other,) = {*(tmp_path / "cache").rglob("*.json")} - {file}
    other.write_bytes(file.read_bytes())
    assert verdicts(tmp_path).get("cut", "other") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    verdicts(tmp_path).put("cut", True)
    assert verdicts(tmp_path).get("cut") is None


def test_ranks_that_write_at_once_leave_whole_files(tmp_path: Path) -> None:
    plan = {"names": [f"layer {i}" for i in range(2000)]}

    def write() -> None:
        for _ in range(20):
            verdicts(tmp_path).put("shards", plan)
            assert verdicts(tmp_path).get("shards") == plan

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = (tmp_path / "cache" / "verdicts").iterdir()
    assert json.loads(file.read_text())["verdict"] == plan


def test_the_folder_is_chosen_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() is None  # empty: off
    monkeypatch.setenv("HF_PARALLEL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("HF_PARALLEL_CACHE")
    assert cache_folder() is None


def about(**changes: Any) -> Verdicts:
    given: dict[str, Any] = {"model": llama(), "config": HFParallelConfig(pp_size=2), "shape": MeshShape(1, 2, 1)}
    given |= {"device": torch.device("cpu"), "batch": {"input_ids": torch.arange(6).view(2, 3)}}
    return verdicts_of(**given | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"config": HFParallelConfig(pp_size=2, pipeline={"num_microbatches": 3})},
        {"shape": MeshShape(2, 2, 1)},
        {"batch": {"input_ids": torch.ones(2, 3, dtype=torch.long)}},
    ],
)
def test_a_run_of_another_kind_asks_anew(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PARALLEL_CACHE", str(tmp_path))
    about().put("cut", True)
    assert about().get("cut") is True
    assert about(**changes).get("cut") is None


def test_another_release_or_mode_asks_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PARALLEL_CACHE", str(tmp_path))
    about().put("cut", True)
    with monkeypatch.context() as inside:
        inside.setattr(verdicts_module, "version", lambda package: "99.0")
        assert about().get("cut") is None
    with monkeypatch.context() as inside:
        inside.setattr(verdicts_module, "_own_files", lambda: "edited")
        assert about().get("cut") is None
    torch.use_deterministic_algorithms(True)
    try:
        assert about().get("cut") is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert about().get("cut") is True


def test_files_of_this_package_that_changed_since_the_import_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts_module._own_files.cache_clear()
    monkeypatch.setattr(verdicts_module, "_IMPORTED_AT", 0.0)
    with pytest.raises(UnknownError, match="changed after it was imported"):
        verdicts_module._own_files()
    verdicts_module._own_files.cache_clear()


def test_who_insists_on_a_check_gets_one() -> None:
    assert HFParallelConfig(pp_size=2).remembers_verdicts
    for self_check in ("on", "full"):
        assert not HFParallelConfig(pp_size=2, pipeline={"self_check": self_check}).remembers_verdicts
        assert not HFParallelConfig(tp_size=2, tensor_parallel={"self_check": self_check}).remembers_verdicts
