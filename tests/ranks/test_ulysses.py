"""A stock Trainer whose ranks share the sequence of each row trains as one process does.

If a row fails, setting `sp_size` changes what users train.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from counted_calls import sizes_of_calls
from rank_runner import run_ranks
from thinning import slow_if
from trainer_cases import ENV, NO_NOISE, Case, compare, run_all, wanted_cases
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Trainer,
    TrainingArguments,
)
from zoo.rows import rows_main

from hf_parallel.engine.plan import share_rows
from hf_parallel.engine.plan.share_rows import judge_rows
from hf_parallel.errors import PlanError
from hf_parallel.model import narrow
from hf_parallel.model.probes import Probes
from hf_parallel.ulysses.attention import Shared, share_attention
from hf_parallel.ulysses.exchange import SequenceGroup
from hf_parallel.ulysses.forward import share_forward


sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from bench_ulysses import kept


pytestmark = [pytest.mark.timeout(300)]

SP2: dict[str, Any] = {"sp_size": 2}
PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 3}
VARIABLE: dict[str, Any] = {"steps": 3, "variable_length": True}  # some rows of odd length
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
TWO_RANKS = [
    Case("ulysses2", parallel=SP2, evaluate=True, metrics=True, accumulation=2, **VARIABLE),
]
TWO_RANKS_LONG = [
    Case("ulysses2_gpt2", model="gpt2", parallel=SP2, arguments=NO_NOISE, **VARIABLE),
    Case("ulysses2_sliding", model="sliding", parallel=SP2, **VARIABLE),
    Case("ulysses2_odd_heads", model="uneven", parallel=SP2, **VARIABLE),
    Case("ulysses2_gpt_oss", model="gpt_oss_biased", parallel=SP2, arguments=NO_NOISE, **VARIABLE),
    # Rows of 16 tokens, of which the probes of the start and the first rank's parts are on one side of a limit, and whole rows on the other.
    Case("ulysses2_longrope", model="longrope", parallel=SP2, steps=3, evaluate=True),
    Case("ulysses2_dynamic_rope", model="dynamic_rope", parallel=SP2, steps=3),
    Case("ulysses2_latent", model="deepseek_v3", parallel=SP2, **VARIABLE),
    # Padding has embeddings of zeros, of which this model takes roots.
    Case("ulysses2_gemma3n", model="gemma3n", parallel=SP2, arguments=NO_NOISE, **VARIABLE),
    Case("ulysses2_experts", model="mixtral_plain", parallel=SP2, **VARIABLE),
    Case("ulysses2_lora", model="llama_lora", parallel=SP2, **VARIABLE),
    Case("ulysses2_zero1", parallel={**SP2, "zero": {"stage": 1}}, **VARIABLE),
    Case("ulysses2_zero2", parallel={**SP2, "zero": {"stage": 2}}, accumulation=2, **VARIABLE),
    Case("ulysses2_zero3", parallel={**SP2, "zero": {"stage": 3}}, **VARIABLE),
    Case("ulysses2_recomputed", parallel={**SP2, "activation_checkpointing": {"every": 2}}, **VARIABLE),
    Case(
        "ulysses2_offloaded", parallel={**SP2, "activation_checkpointing": {"every": 1, "offload": True}}, **VARIABLE
    ),
    Case(
        "ulysses2_selective",
        parallel={**SP2, "activation_checkpointing": {"every": 2, "mode": "selective"}},
        **VARIABLE,
    ),
    Case("ulysses2_checkpointing", parallel=SP2, arguments={"gradient_checkpointing": True}, **VARIABLE),
    Case("ulysses2_own_loss", parallel=SP2, loss="func", **VARIABLE),
    Case("ulysses2_subclass", parallel=SP2, loss="subclass", **VARIABLE),
    Case("ulysses2_smoothing", parallel=SP2, arguments={"label_smoothing_factor": 0.1}, **VARIABLE),
    Case("ulysses2_bart", model="bart", parallel=SP2, evaluate=True, accumulation=2, arguments=NO_NOISE, **VARIABLE),
    Case(
        "ulysses2_bart_reentrant",
        model="bart",
        parallel=SP2,
        arguments={**NO_NOISE, **REENTRANT},
        **VARIABLE,
    ),
    Case(
        "ulysses2_roberta_zero3",
        model="roberta",
        parallel={**SP2, "zero": {"stage": 3}},
        arguments={"adam_epsilon": 1e-4},  # a bias that begins at zero is its updates, and what noise there is in them
        **VARIABLE,
    ),
    Case("ulysses2_opt", model="opt", parallel=SP2, evaluate=True, arguments=NO_NOISE, **VARIABLE),
    Case("ulysses2_saved", parallel={**SP2, "zero": {"stage": 1}}, save=True, **VARIABLE),
]
FOUR_RANKS = [
    Case("ulysses2_dp2", parallel=SP2, accumulation=2, **VARIABLE),
    Case(
        "ulysses2_dp2_zero1",
        model="llama_tied",
        parallel={**SP2, "zero": {"stage": 1}},
        arguments=NO_NOISE,
        **VARIABLE,
    ),
    Case("ulysses2_dp2_zero2", parallel={**SP2, "zero": {"stage": 2}}, accumulation=2, **VARIABLE),
    Case("ulysses2_dp2_zero3", parallel={**SP2, "zero": {"stage": 3}}, accumulation=2, **VARIABLE),
    Case("ulysses2_tp2", parallel={**SP2, "tp_size": 2}, evaluate=True, metrics=True, arguments=NO_NOISE, **VARIABLE),
    Case("ulysses2_tp2_qwen3", model="qwen3", parallel={**SP2, "tp_size": 2}, accumulation=2, **VARIABLE),
    Case("ulysses2_pp2", parallel={**SP2, **PP2}, evaluate=True, metrics=True, accumulation=2, **VARIABLE),
    Case("ulysses2_pp2_gpt2", model="gpt2", parallel={**SP2, **PP2}, arguments=NO_NOISE, **VARIABLE),
    Case(
        "ulysses2_pp2_zero_bubble",
        model="llama_tied",
        parallel={**SP2, **PP2, "schedule": "zbv_zero_bubble"},
        arguments=NO_NOISE,
        **VARIABLE,
    ),
    Case(
        "ulysses2_pp2_recomputed",
        parallel={**SP2, **PP2, "activation_checkpointing": {"every": 1}, "zero": {"stage": 1}},
        **VARIABLE,
    ),
    Case("ulysses2_pp2_bart", model="bart", parallel={**SP2, **PP2}, evaluate=True, arguments=NO_NOISE, **VARIABLE),
    Case("ulysses2_pp2_roberta", model="roberta", parallel={**SP2, **PP2}, arguments=NO_NOISE, **VARIABLE),
    Case("ulysses2_tp2_opt", model="opt", parallel={**SP2, "tp_size": 2}, arguments=NO_NOISE, **VARIABLE),
    Case(
        "ulysses2_pp2_longrope",
        model="longrope",
        parallel={**SP2, "pp_size": 2, "num_microbatches": 1, "activation_checkpointing": {"every": 1}},
        steps=3,
    ),
    Case("ulysses2_pp2_own_loss", parallel={**SP2, **PP2}, loss="func", **VARIABLE),
    Case("ulysses4_repeated", parallel={"sp_size": 4}, **VARIABLE),  # two key-value heads
]
# Slow: what other rows show on two ranks, or on four with the other axis, model or stage of ZeRO.
REST = (
    "ulysses2_zero1",
    "ulysses2_recomputed",
    "ulysses2_dp2_zero1",
    "ulysses2_dp2_zero2",
    "ulysses2_tp2_qwen3",
    "ulysses2_pp2_gpt2",
    "ulysses2_pp2_roberta",
    "ulysses2_pp2_own_loss",
    "ulysses2_zero3",
    "ulysses2_own_loss",
    "ulysses2_bart",
    "ulysses2_opt",
    "ulysses2_dp2",
    "ulysses2_pp2_longrope",
)


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_all({2: TWO_RANKS}, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def long_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {size: wanted_cases(request, rows) for size, rows in ((2, TWO_RANKS_LONG), (4, FOUR_RANKS))}
    return run_all(cases, tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.name)
def test_parts_of_rows_train_as_the_stock_trainer_does(case: Case, short_runs: dict[str, dict[str, Any]]) -> None:
    compare(short_runs[case.name], short_runs[f"stock_{case.name}"])


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=slow_if(case.name, REST), id=case.name) for case in TWO_RANKS_LONG + FOUR_RANKS],
)
def test_parts_of_rows_train_so_with_all_else(case: Case, long_runs: dict[str, dict[str, Any]]) -> None:
    compare(long_runs[case.name], long_runs[f"stock_{case.name}"])


def documents(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Each row is two documents, told apart by positions; without a mask. Two ranks do not divide its 15 tokens."""
    rows = [feature["input_ids"][:15] for feature in features]
    positions = [[*range(6), *range(9)] for _ in rows]
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows), "position_ids": torch.tensor(positions)}


def trained(rank: int, world_size: int, kind: str, model: str) -> list[float]:
    """Losses and gradient norms of three steps."""
    from hf_parallel import HFParallelCallback

    kinds: dict[str, type[Trainer]] = {"packed": Trainer, "penalty": Penalised}
    arguments = TrainingArguments(
        kind,
        per_device_train_batch_size=4,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        adam_epsilon=1e-5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    made = tiny.MODELS[model]()
    made.config.use_cache = False  # or transformers sees no documents
    trainer = kinds[kind](
        made,
        arguments,
        train_dataset=tiny.rows(16),
        data_collator=documents if kind == "packed" else tiny.collate,
        callbacks=[HFParallelCallback({}, sp_size=2)] if world_size > 1 else [],
    )
    trainer.train()
    found = [log[key] for log in trainer.state.log_history for key in ("loss", "grad_norm") if key in log]
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    return [*found, *(float(p.detach().sum()) for p in made.parameters())]


class Penalised(Trainer):
    """A term on the parameters, which every rank computes."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, **kwargs)
        penalty = 0.05 * sum(p.norm() for p in model.parameters())
        return (found[0] + penalty, found[1]) if return_outputs else found + penalty


def all_trained(rank: int, world_size: int, cases: list[tuple[str, str]]) -> list[list[float]]:
    return [trained(rank, world_size, *case) for case in cases]


@pytest.mark.long
def test_documents_in_rows_and_losses_on_parameters_are_those_of_one_process(tmp_path: Path) -> None:
    cases = [("packed", "llama"), ("packed", "sliding"), ("penalty", "llama_tied")]
    alone = run_ranks(all_trained, 1, cases, tmp_path=tmp_path, init_group=False, env=ENV)[0]
    for mine in run_ranks(all_trained, 2, cases, tmp_path=tmp_path, env=ENV):
        for case, values, expected in zip(cases, mine, alone, strict=True):
            assert values == pytest.approx(expected, rel=1e-5, abs=1e-5), case


REFUSED = {
    "mamba": r"backbone\.layers\.0\.mixer .*sp_size to 1",
    "bloom": r"transformer\.h\.0\.self_attention .*sp_size to 1",
    "mixtral": r"config\.output_router_logits=True .*or sp_size to 1",
    "llama4": r"model\.layers\.1\.self_attn counts the tokens that it is given.*sp_size to 1",
    "llama": r"model\.layers\.0 does not run on a part of the sequence: ValueError: on rank 1 alone.*sp_size to 1",
}


def raises_on_one_rank(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """A hook on the MLP of a block: of whole rows it takes what it does not take on the second rank."""
    if dist.get_rank() == 1 and args[0].shape[1] <= 4:
        raise ValueError("on rank 1 alone")


def judged(rank: int, world_size: int, models: list[str]) -> list[str]:
    """What each model is refused with."""
    found = []
    for name in models:
        model = tiny.MODELS[name]()
        if name == "llama":
            model.model.layers[0].mlp.register_forward_pre_hook(raises_on_one_rank)
        with pytest.raises(PlanError) as refused:
            judge_rows(model, Shared(SequenceGroup(dist.group.WORLD)), Probes(model, torch.device("cpu")))
        found.append(str(refused.value))
    return found


def test_a_model_that_mixes_tokens_elsewhere_is_refused_with_the_module(tmp_path: Path) -> None:
    for messages in run_ranks(judged, 2, list(REFUSED), tmp_path=tmp_path, env=ENV):
        for message, pattern in zip(messages, REFUSED.values(), strict=True):
            assert re.search(pattern, message), message


def narrowly_judged(rank: int, world_size: int) -> tuple[list[int], list[int], str]:
    """Elements of what was tried of a wide model, of one whose narrow copy is refused, and the refusal of one that is wrong."""
    narrow.SMALL = 0  # type: ignore[misc]
    group = SequenceGroup(dist.group.WORLD)
    tried = sizes_of_calls(share_rows, "verify_model")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**tiny.SMALL | {"hidden_size": 128, "intermediate_size": 192}))
    probes = Probes(model, torch.device("cpu"))
    judge_rows(model, Shared(group), probes)
    first = list(tried)
    tried.clear()
    counted = share_rows.verify_model

    def refuses(model: torch.nn.Module, shared: Shared, *args: Any) -> None:
        counted(model, shared, *args)
        assert shared.whole.tables == ("model.rotary_emb",)
        shared.is_mean = True
        share_rows.verify_model = accepts
        raise PlanError("of the narrow one")

    def accepts(model: torch.nn.Module, shared: Shared, *args: Any) -> None:
        assert not shared.is_mean  # nothing is left of what was found out about the narrow one
        assert not shared.whole.tables
        counted(model, shared, *args)

    share_rows.verify_model = refuses
    judge_rows(model, Shared(group), probes)
    second = list(tried)
    share_rows.verify_model = counted
    bloom = BloomForCausalLM(
        BloomConfig(hidden_size=128, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2)
    )
    with pytest.raises(PlanError) as refused:
        judge_rows(bloom, Shared(group), Probes(bloom, torch.device("cpu")))
    return first, second, str(refused.value)


def test_a_narrow_model_is_tried_on_parts_of_rows_and_the_wide_one_has_the_last_word(tmp_path: Path) -> None:
    """The check of the real widths in fp32, with two sets of gradients, would be many times the model."""
    for first, second, refusal in run_ranks(narrowly_judged, 2, tmp_path=tmp_path, env=ENV):
        whole = second[-1]
        assert len(set(first)) == 1
        assert first[0] < whole / 8
        assert set(second) == {first[0], whole}
        assert re.search(REFUSED["bloom"], refusal), refusal


def faintly_judged(rank: int, world_size: int) -> str:
    """The refusal of a wide model that mixes tokens, whose config names a spread with which its narrow copy would not be seen to."""
    narrow.SMALL = 0  # type: ignore[misc]
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    linear = heads | {"layer_types": ["linear_attention", "full_attention"]}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = OlmoHybridConfig(**sizes | linear | ids | {"num_key_value_heads": 2, "initializer_range": 1e-3})
    torch.manual_seed(0)
    model = OlmoHybridForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # trained
    tried = sizes_of_calls(share_rows, "verify_model")
    with pytest.raises(PlanError) as refused:
        judge_rows(model, Shared(SequenceGroup(dist.group.WORLD)), Probes(model, torch.device("cpu")))
    assert min(tried) < max(tried)  # a narrow copy was tried
    return str(refused.value)


@pytest.mark.long
def test_a_narrow_copy_of_a_config_with_a_small_spread_hides_nothing(tmp_path: Path) -> None:
    for refusal in run_ranks(faintly_judged, 2, tmp_path=tmp_path, env=ENV):
        assert re.search(r"linear_attn mixes tokens", refusal), refusal


# A mask made of the part, a mask by keyword, positions counted from ids, from a mask, and without either, fillings without a gradient.
OWN_WAYS = ["biogpt", "afmoe", "roberta", "opt", "bart", "gemma3n_text"]


@pytest.mark.long
def test_types_that_make_masks_and_positions_themselves_are_exact(tmp_path: Path) -> None:
    for rows in run_ranks(rows_main, 2, OWN_WAYS, tmp_path=tmp_path, env=ENV):
        assert [(row.name, row.verdict, row.note) for row in rows] == [(name, "exact", "") for name in OWN_WAYS]


def dropped(rank: int, world_size: int) -> tuple[float, list[bool]]:
    """A token that every rank has in its part: the hidden state that dropout leaves of it, and the random state after."""
    torch.manual_seed(7)
    model = tiny.MODELS["gpt2_dropout"]().train()
    shared = Shared(SequenceGroup(dist.group.WORLD))
    forward = share_forward(model, model.forward, shared)
    share_attention(model, shared)
    kept: list[torch.Tensor] = []
    model.transformer.drop.register_forward_hook(lambda module, args, output: kept.append(output == 0))
    forward(input_ids=torch.full((1, 8), 3), labels=torch.full((1, 8), 3))
    return float(torch.rand(())), kept[0].flatten().tolist()


def test_each_part_of_a_row_has_dropout_masks_of_its_own_and_ranks_stay_alike(tmp_path: Path) -> None:
    (first, mask), (second, other) = run_ranks(dropped, 2, tmp_path=tmp_path, env=ENV)
    assert first == second
    assert 0 < sum(mask) < len(mask)
    assert mask != other


def test_activations_of_a_rank_fall_with_the_number_of_ranks(tmp_path: Path) -> None:
    """By their number, but for what attention gives in each block, which is there with its heads and with its tokens."""
    hidden, blocks, length, rows = 256, 2, 128, 2
    sizes = ("llama", hidden, blocks, length, rows)
    counts = {n: run_ranks(kept, n, *sizes, tmp_path=tmp_path, init_group=n > 1, env=ENV) for n in (1, 2)}
    twice = blocks * rows * (length // 2) * hidden * 4
    assert max(counts[2]) <= 0.505 * counts[1][0] + twice
    assert min(counts[2]) >= 0.45 * counts[1][0]
