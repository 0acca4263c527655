"""A dry run counts what a rank's step takes, and refuses what a run would refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BloomConfig,
    DeepseekV3Config,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
)
from typer.testing import CliRunner

from hf_parallel import dry_run_recipe
from hf_parallel.cli.main import app
from hf_parallel.errors import ConfigError, PlanError
from hf_parallel.memory.allocations import Allocations, Block
from hf_parallel.tensor_parallel.plan.plan_for import plan_for
from hf_parallel.tensor_parallel.plan.widened import widened


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
LATENT: dict[str, Any] = {"moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
LATENT |= {"topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 64}
LATENT |= {"qk_rope_head_dim": 32, "v_head_dim": 64}


def recipe(tmp_path: Path, section: str, processes: int = 2, extra: str = "") -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: {processes}\n{extra}"
        f"parallelism_config:\n  hf_parallel: {section}\n"
    )
    return path


def test_the_peak_is_what_was_there_when_most_was() -> None:
    ledger, first, second = Allocations(), Block("weights"), Block("activations")
    ledger.resize(first, 1000)  # rounded up to 1024
    ledger.begin()
    ledger.resize(second, 512)
    second.kind = "logits"  # may be said later
    ledger.resize(first, 0)
    ledger.resize(Block("gradients"), 400)
    found = ledger.peak()
    assert found.total_bytes == 1536
    assert dict(found.by_kind) == {"weights": 1024, "logits": 512}
    assert ledger.now_bytes == 1024
    ledger.begin()
    assert ledger.peak().total_bytes == 1024  # what is there stays


@pytest.mark.parametrize("section", ["{}", "{zero: {stage: 1}}", "{zero: {stage: 3}}", "{pp_size: 2}", "{tp_size: 2}"])
def test_a_rank_holds_the_bytes_of_the_formulas(section: str, tmp_path: Path) -> None:
    """fp32: 4 bytes of weights and 8 of Adam's state for each parameter, shared out as the layout says."""
    found = dry_run_recipe(recipe(tmp_path, section), LlamaConfig(**SIZES), rows=2, length=128)
    kinds = found.peak.by_kind
    parameters = 2 * (4 * 256**2 + 3 * 256 * 688 + 2 * 256) + 2 * 1000 * 256 + 256
    share = 0.5 if "stage: 1" in section or "stage: 3" in section else 1.0
    assert kinds["optimizer state"] == pytest.approx(8 * found.parameters * share, rel=0.05)
    if section == "{}":
        assert found.parameters == parameters
        assert kinds["weights"] == pytest.approx(4 * parameters, rel=0.01)
    elif "size: 2" in section:
        assert found.parameters == pytest.approx(parameters / 2, rel=0.02)
    assert found.after_bytes < found.peak_bytes


def test_messages_are_counted_by_axis(tmp_path: Path) -> None:
    found = dry_run_recipe(
        recipe(tmp_path, "{pp_size: 2, pipeline: {num_microbatches: 4}}"), LlamaConfig(**SIZES), rows=4, length=128
    )
    sent = next(one for one in found.messages if one.operation == "send")
    assert (sent.axis, sent.calls, sent.total_bytes) == ("pp", 4, 4 * 128 * 256 * 4)
    found = dry_run_recipe(recipe(tmp_path, "{}"), LlamaConfig(**SIZES), length=128)
    reduced = [one for one in found.messages if one.operation == "allreduce" and one.axis == "dp"]
    assert sum(one.total_bytes for one in reduced) == pytest.approx(4 * found.parameters, rel=0.01)


def test_ranks_that_share_experts_send_each_other_half_of_the_tokens(tmp_path: Path) -> None:
    """A row has its bytes, the weight of its expert and that expert's number; tokens are taken to be routed evenly."""
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    alone, shared = (
        dry_run_recipe(recipe(tmp_path, section), config, rows=2, length=128) for section in ("{}", "{ep_size: 2}")
    )
    experts = 2 * 4 * 3 * 256 * 688
    assert alone.parameters - shared.parameters == experts / 2
    rows = [
        one for one in shared.messages if one.axis == "dp" and one.operation == "alltoall" and one.dtype == "float32"
    ]
    # There and back, in each block, forward and backward.
    assert sum(one.calls for one in rows) == 2 * 2 * 2
    assert sum(one.total_bytes for one in rows) == pytest.approx(2 * 2 * 2 * (2 * 2 * 128) * 256 * 4, rel=0.01)
    saved = alone.peak.by_kind["weights"] - shared.peak.by_kind["weights"]
    assert saved == pytest.approx(4 * experts / 2, rel=0.01)


def test_gradients_are_compressed_as_after_the_warm_up(tmp_path: Path) -> None:
    found = {}
    for method in ("none", "powersgd"):
        section = f"{{gradient_compression: {{method: {method}}}}}"
        found[method] = dry_run_recipe(recipe(tmp_path, section), LlamaConfig(**SIZES), length=128)
    sent = {method: sum(one.total_bytes for one in run.messages if one.axis == "dp") for method, run in found.items()}
    assert sent["powersgd"] < sent["none"] / 2
    residual = 4 * found["none"].parameters
    assert found["powersgd"].after_bytes - found["none"].after_bytes >= residual


@pytest.mark.parametrize("rank", [0, 3])
def test_stages_of_shards_run_dry(rank: int, tmp_path: Path) -> None:
    """Groups are made of every stage and of every shard, and a rank is in some of them only."""
    section = "{tp_size: 2, pp_size: 2, pipeline: {num_microbatches: 2}}"
    found = dry_run_recipe(recipe(tmp_path, section, 4), LlamaConfig(**SIZES), rank=rank, rows=2, length=64)
    assert {"tp", "pp"} <= {each.axis for each in found.messages}


def test_the_later_stage_gets_what_the_first_one_sends(tmp_path: Path) -> None:
    file = recipe(tmp_path, "{pp_size: 2, pipeline: {num_microbatches: 2}}", extra="mixed_precision: bf16\n")
    found = dry_run_recipe(file, LlamaConfig(**SIZES), rank=1, rows=4, length=128)
    got = next(one for one in found.messages if one.operation == "recv")
    assert (got.axis, got.calls) == ("pp", 2)
    assert found.rank == "rank 1 (pp 1 of 2)"


def test_blocks_that_run_again_keep_parts_of_a_shared_sequence_alone(tmp_path: Path) -> None:
    """What a block gathers lived as long as its graph, which a checkpoint keeps."""
    section = "{tp_size: 2, tensor_parallel: {sequence_parallel: true}, activation_checkpointing: {every: 1}}"
    rows, length, peaks = 4, 512, []
    for blocks in (2, 4):
        config = LlamaConfig(**SIZES | {"num_hidden_layers": blocks})
        found = dry_run_recipe(recipe(tmp_path, section), config, rows=rows, length=length)
        peaks.append(found.peak_bytes - 16 * found.parameters)
    part = 4 * rows * length * SIZES["hidden_size"] / 2
    assert (peaks[1] - peaks[0]) / 2 <= 1.1 * part


@pytest.mark.parametrize(
    ("section", "kind", "sizes"),
    [
        ("{pp_size: 2}", MixtralConfig, {"num_local_experts": 4}),  # autocast leaves weights of experts in fp32
        ("{tp_size: 2}", DeepseekV3Config, LATENT),  # values are narrower than queries
        ("{zero: {stage: 1, offload_optimizer: cpu}}", LlamaConfig, {}),
    ],
)
def test_odd_steps_run_dry(section: str, kind: Any, sizes: dict[str, Any], tmp_path: Path) -> None:
    config = kind(**SIZES | sizes)
    path = recipe(tmp_path, section, extra="mixed_precision: bf16\n")
    assert dry_run_recipe(path, config, rows=2, length=64).peak_bytes > 0


@pytest.mark.parametrize("precision", ["fp32", "half"])
def test_experts_run_dry_on_the_cpu(precision: Any) -> None:
    """Torch's rule for the shape of a grouped product knows bf16 alone."""
    config = MixtralConfig(**SIZES | {"num_local_experts": 4})
    found = dry_run_recipe("cpu_pp2", config, rows=2, length=64, precision=precision)
    assert found.peak_bytes > found.peak.by_kind["weights"] > 0


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ("{sp_size: 2}", r"sp_size=2: transformer\.h\.0\.self_attention"),
        ("{sp_size: 2, pp_size: 2}", r"sp_size=2: transformer\.h\.0\.self_attention"),
    ],
)
def test_a_model_that_does_not_run_on_parts_of_a_row_is_refused(section: str, what: str, tmp_path: Path) -> None:
    config = BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=128)
    path = recipe(tmp_path, section, processes=4 if "pp" in section else 2)
    with pytest.raises(PlanError, match=what + " does not run on a part of the sequence: .*Set sp_size to 1;"):
        dry_run_recipe(path, config, rank=0, rows=2, length=64)


def test_a_type_whose_layers_take_no_adapters_is_refused(tmp_path: Path) -> None:
    config = Mamba2Config(hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, n_groups=1, vocab_size=128)
    with pytest.raises(
        ConfigError, match=r"lora_rank=4: PEFT puts no adapters on .*Mamba2ForCausalLM: .*Leave lora_rank out"
    ):
        dry_run_recipe(recipe(tmp_path, "{}"), config, rows=1, length=64, lora_rank=4)


def test_what_fails_on_whole_rows_too_is_not_blamed_on_their_parts(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES | {"num_local_experts": 4, "intermediate_size": 100})
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        dry_run_recipe(recipe(tmp_path, "{sp_size: 2}"), config, rows=1, length=64, precision="half")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = vars(torch.cuda).copy()
    dry_run_recipe(recipe(tmp_path, "{tp_size: 2}"), LlamaConfig(**SIZES), length=64)
    assert vars(torch.cuda) == before
    assert not dist.is_initialized()
    assert torch.accelerator.current_accelerator() is None or torch.cuda.is_available()
    weight = torch.ones(2, requires_grad=True)
    (weight * 3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_names_of_a_shared_sequence_are_gone_afterwards(tmp_path: Path) -> None:
    before = list(AttentionInterface()), list(AttentionMaskInterface())
    dry_run_recipe(recipe(tmp_path, "{sp_size: 2}"), LlamaConfig(**SIZES), rows=1, length=64)
    assert (list(AttentionInterface()), list(AttentionMaskInterface())) == before


def test_a_narrow_plan_is_the_wide_one() -> None:
    """A plan does not depend on the widths but for its sizes."""
    wide = LlamaConfig(**SIZES)
    narrow = LlamaConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 172})
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        models = LlamaForCausalLM(narrow), LlamaForCausalLM(wide)
    made = widened(plan_for(narrow, 2, sequence=True), *models)
    expected = plan_for(wide, 2, sequence=True)
    for one in (made, expected):
        one.flops.clear()
    assert made.to_json() == expected.to_json()


def test_a_wide_model_needs_no_memory(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=2,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=4096,
    )
    found = dry_run_recipe(
        recipe(tmp_path, "{tp_size: 8}", 8, "mixed_precision: bf16\n"), config, length=512, precision="half"
    )
    assert found.parameters * 8 == pytest.approx(
        2 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 2 * 4096 * 8192, rel=0.01
    )


@pytest.mark.parametrize(
    ("section", "options", "match"),
    [
        ("{pp_size: 3}", {}, "num_processes=2 is below tp_size . pp_size"),
        ("{tp_sise: 2}", {}, "tp_sise"),
        ("{zero: {stage: 1, engine: deepspeed}}", {}, "zero.engine=deepspeed: it trains with code of its own"),
        ("{pp_size: 2}", {"rank": 2}, "rank=2: the file starts 2 processes. Give a rank from 0 to 1"),
        ("{pp_size: 2}", {"rows": 0}, "rows=0: it is 1 or more"),
        ("{pp_size: 2}", {"precision": "int3"}, "precision='int3': expected one of fp32, half, autocast"),
        ("auto", {}, "layout=auto: there is no layout before training starts"),
    ],
)
def test_what_a_run_would_refuse_is_refused(section: str, options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        dry_run_recipe(recipe(tmp_path, section), LlamaConfig(**SIZES), **options)


def test_the_command_tells_what_validate_tells_of_a_bad_file(tmp_path: Path) -> None:
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "model")
    path = str(recipe(tmp_path, "{pp_size: 3, tp_sise: 2}"))
    told = [
        CliRunner().invoke(app, [*command, path, "--model", str(tmp_path / "model")])
        for command in (["validate"], ["dry-run"])
    ]
    assert [one.exit_code for one in told] == [1, 1]
    assert told[1].output.strip() in told[0].output.strip()


def test_the_command_prints_json(tmp_path: Path) -> None:
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "model")
    command = [
        "dry-run",
        str(recipe(tmp_path, "{tp_size: 2}")),
        "--model",
        str(tmp_path / "model"),
        "--length",
        "128",
        "--rank",
        "1",
    ]
    told = CliRunner().invoke(app, [*command, "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.output)
    assert found["rank"] == "rank 1 (tp 1 of 2)"
    assert found["peak_bytes"] == sum(found["peak_by_kind"].values())
    assert {one["axis"] for one in found["messages"]} >= {"tp"}
    text = CliRunner().invoke(app, command).output
    assert "peak" in text
    assert "weights" in text


def test_a_sharded_head_keeps_its_logits_local(tmp_path: Path) -> None:
    """The first call asks all ranks whether that fits: what they would answer is that it does."""
    config = LlamaConfig(**SIZES | {"vocab_size": 8192})
    found = dry_run_recipe(recipe(tmp_path, "{tp_size: 2}"), config, rows=2, length=128)
    whole = 2 * 128 * 8192 * 4
    assert all(one.total_bytes < whole / 2 for one in found.messages if one.operation == "allgather")
    assert max(size // count for size, count, *_ in found.peak.largest) <= whole // 2 + 4096 * 256 * 4


@pytest.mark.parametrize(
    "section",
    [
        "{}",
        *(
            pytest.param(more, marks=pytest.mark.long)
            for more in ("{pp_size: 2, pipeline: {num_microbatches: 2}}", "{zero: {stage: 1}}")
        ),
    ],
)
def test_adapters_alone_have_gradients_and_optimizer(section: str, tmp_path: Path) -> None:
    """Rank 4 on seven linear layers of each block: 4 * (inputs + outputs) parameters each, 8 bytes of state for each."""
    pytest.importorskip("peft")
    file = recipe(tmp_path, section)
    found, whole = (dry_run_recipe(file, LlamaConfig(**SIZES), rows=2, length=128, lora_rank=rank) for rank in (4, 0))
    adapters = SIZES["num_hidden_layers"] * 4 * (4 * 2 * 256 + 3 * (256 + 688))
    trained = adapters / (2 if "pp" in section else 1)
    share = 2 if "stage" in section else 1
    assert found.parameters - whole.parameters == pytest.approx(trained, rel=0.3 if "pp" in section else 0)
    state = found.peak.by_kind["optimizer state"]
    assert state == pytest.approx(8 * (found.parameters - whole.parameters) / share, rel=0.1)
    assert found.peak_bytes < whole.peak_bytes


@pytest.mark.timeout(120)
def test_a_frozen_pipeline_makes_no_logits(tmp_path: Path) -> None:
    """The model that shows whether the loss needs them has no adapters, so its head has another name."""
    pytest.importorskip("peft")
    file = recipe(tmp_path, "{pp_size: 2, pipeline: {num_microbatches: 2}}")
    found = dry_run_recipe(file, LlamaConfig(**SIZES), rank=1, rows=2, length=1024, lora_rank=4)
    logits = 1024, SIZES["vocab_size"]
    assert all(shape[-2:] != logits for _, _, _, shape, *_ in found.peak.largest)


def test_adapters_are_refused_where_a_plan_takes_values(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_rank=4 with tp_size=2: .*Leave it out"):
        dry_run_recipe(recipe(tmp_path, "{tp_size: 2}"), LlamaConfig(**SIZES), length=64, lora_rank=4)
