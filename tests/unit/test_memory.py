"""The arithmetic gives the published and measured numbers, and its activations are what autograd keeps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from saved_tensors import saved

from hf_parallel.errors import ConfigError
from hf_parallel.memory.activations import ON_HOST, activations, saved_by_block
from hf_parallel.memory.block import trace_block
from hf_parallel.memory.estimate import OVERHEAD, buffers, estimate, host_states, states
from hf_parallel.memory.report import GB, describe, shortages, tight, zero_table
from hf_parallel.memory.shape import shape_of, shape_of_config
from hf_parallel.memory.terms import Layout, ModelShape, Work, layout_of
from hf_parallel.settings.config import HFParallelConfig


SEVEN = ModelShape(6_738_415_616, 32, 4096, 11008, 32000, 32, 32, 128, 131_072_000, 131_072_000, largest=131_072_000)
TEN = ModelShape(10_000_000_000, 48, 4096, 11008, 32000, 32, 32, 128, 131_072_000, 131_072_000, largest=131_072_000)
SEVENTY = ModelShape(
    70_553_706_496, 80, 8192, 28672, 128256, 64, 8, 128, 1_050_673_152, 1_050_673_152, largest=1_050_673_152
)


def recompute(every: int, mode: str = "block") -> Any:
    return HFParallelConfig(activation_checkpointing={"every": every, "mode": mode}).activation_checkpointing


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, (14, 14, 84)), (1, (14, 14, 10.5)), (2, (14, 1.75, 10.5)), (3, (1.75, 1.75, 10.5))],
)
def test_states_of_a_7b_model_on_8_gpus_are_those_of_the_zero_table(stage: int, expected: tuple[float, ...]) -> None:
    found = states(7e9, Layout(8, 8, stage=stage, engine="deepspeed"))
    assert tuple(size / GB for size in found.values()) == expected
    assert [row.split("|")[2:5] for row in zero_table(7e9, 8)[2:]][stage] == [f" {size:.4g} " for size in expected]


def test_a_10b_model_offloaded_from_2_gpus_needs_200_gb_of_ram() -> None:
    layout = Layout(
        2, 2, stage=3, engine="deepspeed", offload_optimizer="cpu", offload_param="cpu", recompute=recompute(2)
    )
    assert sum(host_states(10e9, layout).values()) == 200 * GB
    assert sum(states(10e9, layout).values()) == 0
    memory = estimate(TEN, layout, Work(1, 2048))
    assert memory.gpu_bytes < 24 * GB
    assert memory.host_bytes == memory.host_pinned == 200 * GB
    [problem] = shortages(memory, 24 * GB, 128 * GB)
    assert problem.startswith(
        "RAM: optimizer state and fp32 gradients 160.0 + parameters and gradients 40.0 = 200.0 GB needed for what is "
        "offloaded, 128.0 GB there"
    )
    assert shortages(memory, 24 * GB, 200 * GB) == []
    assert "can become 400.0 GB" in tight(memory, 24 * GB, 256 * GB)[0]
    kept = Layout(2, 2, stage=3, engine="deepspeed", offload_optimizer="cpu")
    assert sum(host_states(10e9, kept).values()) == 160 * GB
    assert sum(states(10e9, kept).values()) == 10 * GB


def test_stage_2_of_a_7b_model_does_not_fit_four_cards_of_40_gb() -> None:
    layout = Layout(4, 4, stage=2, engine="deepspeed")
    assert sum(states(SEVEN.parameters, layout).values()) / GB == pytest.approx(37.1, abs=0.05)
    memory = estimate(SEVEN, Layout(4, 4, stage=2, engine="deepspeed", recompute=recompute(1)), Work(4, 2048))
    [problem] = shortages(memory, 40 * GB, None)
    assert problem.startswith("GPU memory: weights 13.5 + gradients 3.4 + optimizer state 20.2 + reduce bucket 1.0")
    assert "40.0 GB there. Set zero.stage to 1 or more" in problem
    assert shortages(memory, 80 * GB, None) == []
    assert sum(states(SEVEN.parameters, Layout(4, 4, stage=3, engine="deepspeed")).values()) / GB == pytest.approx(
        27, abs=0.05
    )
    shared = Layout(4, 4, stage=2, engine="fsdp2")
    whole = (
        sum(states(SEVEN.parameters, shared).values())
        + buffers(SEVEN.parameters, SEVEN, shared)["gathered parameters"]
    )
    assert whole / GB == pytest.approx(40.4, abs=0.05)


def test_a_70b_model_on_64_gpus_fits_in_every_stage() -> None:
    for stage, expected in ((3, 17.6), (1, 48.5)):
        layout = Layout(64, 8, tp_size=8, stage=stage, engine="deepspeed", recompute=recompute(4))
        assert sum(states(70.55e9 / 8, layout).values()) / GB == pytest.approx(expected, abs=0.05)
        memory = estimate(SEVENTY, layout, Work(1, 4096))
        assert shortages(memory, 80 * GB, None) == []
        assert memory.gpu["logits and loss"] / GB == pytest.approx(0.8, abs=0.05)


def test_a_checkpoint_for_a_group_of_blocks_holds_far_less_than_one_block_in_so_many() -> None:
    kept = {}
    for mode in ("block", "alternate"):
        layout = Layout(64, 8, tp_size=8, stage=3, engine="deepspeed", recompute=recompute(4, mode))
        [terms] = activations(SEVENTY, layout, Work(1, 2048))
        kept[mode] = terms["activations"] + terms["recomputed blocks"]
    assert kept["alternate"] / kept["block"] > 4


@pytest.mark.parametrize(("stage", "expected"), [(0, 16), (1, 7), (2, 5.5), (3, 4)])
def test_states_are_those_measured_with_deepspeed_on_4_ranks(stage: int, expected: float) -> None:
    assert sum(states(1.0, Layout(4, 4, stage=stage, engine="deepspeed")).values()) == expected


def test_states_in_fp32_are_those_measured() -> None:
    for engine, stage, ranks, expected in (
        ("deepspeed", 3, 4, 5), ("deepspeed", 1, 4, 4 + 4 + 3), ("native", 1, 2, 12), ("fsdp2", 3, 2, 8), ("native", 0, 2, 16)
    ):  # fmt: skip
        found = states(1.0, Layout(ranks, ranks, stage=stage, engine=engine, precision="fp32"))
        assert sum(found.values()) == expected


def test_without_zero_the_native_optimizer_keeps_states_in_half_precision() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(t.nbytes for t in optimizer.state[parameter].values() if t.numel() > 1)
    assert states(1000.0, Layout(1, 1))["optimizer state"] == held


def llama(layers: int, kv_heads: int, tied: bool = False) -> Any:
    return transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied,
    )  # fmt: skip


def saved_bytes(config: Any, precision: str, rows: int, length: int) -> int:
    dtype = torch.bfloat16 if precision == "half" else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    cast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    with cast:
        return saved(model, lambda: model(input_ids=torch.randint(0, 97, (rows, length)), use_cache=False))[0]


@pytest.mark.parametrize("precision", ["half", "fp32", "autocast"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_activations_of_a_block_are_what_autograd_keeps(precision: Any, kv_heads: int) -> None:
    rows, length = 2, 32
    per_block = (
        saved_bytes(llama(4, kv_heads), precision, rows, length)
        - saved_bytes(llama(2, kv_heads), precision, rows, length)
    ) / 2
    shape = shape_of_config(llama(4, kv_heads))
    if precision == "autocast":  # its casts of the weights are a term of their own
        matrices = shape.block - (2 + 1 / shape.layers) * shape.hidden  # norms are not cast
        per_block -= buffers(matrices, shape, Layout(1, 1, precision="autocast"))["weights cast to 16 bit"]
    expected = rows * length * saved_by_block(shape, Layout(1, 1, precision=precision), Work(rows, length))
    assert per_block == expected


@pytest.mark.parametrize("precision", ["half", "fp32", "autocast"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_trace_on_fake_tensors_is_what_autograd_keeps(precision: Any, kv_heads: int) -> None:
    counted = shape_of_config(llama(4, kv_heads))
    traced = dataclasses.replace(counted, saved=trace_block(llama(4, kv_heads), precision))
    assert counted.saved is None
    assert traced.saved is not None
    for tp_size in (1, 2):
        layout, work = Layout(2, 2, tp_size=tp_size, precision=precision), Work(1, 300)
        assert saved_by_block(traced, layout, work) == saved_by_block(counted, layout, work)


def test_a_trace_sees_what_no_formula_knows() -> None:
    sizes = {"vocab_size": 97, "n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 512}
    config = transformers.GPT2Config(
        **sizes, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0, bos_token_id=1, eos_token_id=2
    )
    saved = trace_block(config, "half")
    assert saved is not None
    assert saved.square == 0
    short, long = (
        saved_bytes(config, "half", 1, 96) - saved_bytes(copy_of(config, 2), "half", 1, 96),
        saved_bytes(config, "half", 1, 192) - saved_bytes(copy_of(config, 2), "half", 1, 192),
    )
    assert saved.shared + saved.split == (long - short) / 2 / 96
    config._attn_implementation = "eager"
    eager = trace_block(config, "half")
    assert eager is not None
    assert eager.square > 0


def copy_of(config: Any, layers: int) -> Any:
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = layers
    return changed


@pytest.mark.slow
def test_a_state_space_model_is_traced_and_has_no_heads() -> None:
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    saved = trace_block(config, "fp32")
    assert saved is not None
    assert saved.split > 0
    assert shape_of_config(config, "fp32").heads == 0
    with pytest.raises(ConfigError, match=r"config of 'mamba' has num_attention_heads=None"):
        shape_of_config(config)


def test_the_formula_is_the_known_one_per_token_and_width() -> None:
    eight = ModelShape(8_030_261_248, 32, 4096, 14336, 128256, 32, 8, 128)
    assert saved_by_block(eight, Layout(1, 1), Work(1, 4096)) / 4096 == pytest.approx(49.0, abs=0.05)
    assert saved_by_block(SEVEN, Layout(1, 1), Work(1, 4096)) / 4096 == pytest.approx(24 + 8 * 11008 / 4096, abs=0.05)
    eager = saved_by_block(SEVEN, Layout(1, 1), Work(1, 1000, eager_attention=True))
    assert eager - saved_by_block(SEVEN, Layout(1, 1), Work(1, 1000)) == 6 * 32 * 1000


def test_a_shared_sequence_divides_the_norms_too() -> None:
    config = HFParallelConfig(tp_size=8, tensor_parallel={"sequence_parallel": True})
    alone = saved_by_block(SEVEN, Layout(1, 1), Work(1, 100))
    assert saved_by_block(SEVEN, layout_of(config, 8, 8), Work(1, 100)) == alone / 8
    norms = 16 * 4096 + 8
    assert saved_by_block(SEVEN, Layout(8, 8, tp_size=8), Work(1, 100)) == norms + (alone - norms) / 8


def test_checkpointing_keeps_inputs_and_a_group_of_blocks() -> None:
    work, entry = Work(2, 100), 2 * 100 * 4096 * 2
    whole = 200 * saved_by_block(SEVEN, Layout(1, 1), work)
    for every, mode, kept, again in (
        (1, "block", 32 * entry, whole), (5, "block", 7 * entry, 5 * whole), (4, "alternate", 8 * entry + 24 * whole, whole)
    ):  # fmt: skip
        [terms] = activations(SEVEN, Layout(1, 1, recompute=recompute(every, mode)), work)
        assert (terms["activations"], terms["recomputed blocks"]) == (kept, again)


def test_alternate_checkpoints_begin_with_the_first_block_of_a_stage() -> None:
    from hf_parallel.memory.activations import alone_of

    layout = Layout(1, 1, recompute=recompute(2, "alternate"))
    assert [alone_of(count, layout) for count in (4, 5, 1)] == [2, 2, 0]


def test_a_pipeline_holds_what_its_schedule_holds_and_the_head_is_on_the_last_rank() -> None:
    one = 100 * saved_by_block(SEVEN, Layout(1, 1), Work(1, 100))
    held = {}
    for schedule in ("1f1b", "gpipe"):
        config = HFParallelConfig(pp_size=4, pipeline={"schedule": schedule, "num_microbatches": 8})
        ranks = activations(SEVEN, layout_of(config, 4, 4), Work(8, 100))
        held[schedule] = [round(terms["activations"] / (8 * one)) for terms in ranks]
        assert [terms["logits and loss"] > 0 for terms in ranks] == [False, False, False, True]
    assert held == {"1f1b": [4, 3, 2, 1], "gpipe": [8, 8, 8, 8]}
    assert estimate(SEVEN, layout_of(config, 4, 4), Work(8, 100)).rank == 3
    assert estimate(SEVEN, layout_of(HFParallelConfig(pp_size=4), 4, 4), Work(8, 4096)).rank == 0


def test_the_parameters_of_all_stages_are_the_model_and_a_tied_head_once_more() -> None:
    from hf_parallel.memory.estimate import parameters_of_ranks

    for tied in (False, True):
        shape = shape_of_config(llama(5, 8, tied))
        model = transformers.AutoModelForCausalLM.from_config(llama(5, 8, tied))
        assert shape.parameters == model.num_parameters()
        for settings in ({}, {"pipeline": {"split": [3, 2]}}, {"pipeline": {"schedule": "zbv_zero_bubble"}}):
            ranks = parameters_of_ranks(shape, layout_of(HFParallelConfig(pp_size=2, **settings), 2, 2))
            copies = tied and settings != {"pipeline": {"schedule": "zbv_zero_bubble"}}
            assert sum(ranks) == pytest.approx(shape.parameters + copies * 97 * 64)


def test_stage_3_is_fsdp_2_and_offloads_all_or_nothing() -> None:
    zero = {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
    layout = layout_of(HFParallelConfig(zero=zero), 8, 4, "autocast")
    assert (layout.engine, sum(states(1.0, layout).values())) == ("fsdp2", 0)
    assert host_states(8e9, layout) == {"parameters, gradients, optimizer state": 16 * 4e9}
    kept = layout_of(HFParallelConfig(zero={"stage": 3}), 8, 4, "autocast")
    assert sum(states(8.0, kept).values()) == 16
    found = buffers(SEVEN.parameters, SEVEN, kept)
    assert found["gathered embedding and head"] == pytest.approx(4 * 2 * 131_072_000, rel=1e-3)
    by_two = buffers(SEVEN.parameters, SEVEN, dataclasses.replace(kept, recompute=recompute(2)))
    for name, times in {
        "gathered parameters": 2,
        "gradients on their way": 2,
        "gathered embedding and head": 1,
    }.items():
        assert by_two[name] == pytest.approx(times * found[name])


def test_parts_of_gradients_of_the_native_engine_are_fp32() -> None:
    """As `tests/ranks/test_zero.py` measures them with bf16 parameters."""
    found = states(1.0, Layout(4, 4, stage=2, engine="native"))
    assert found == {"weights": 2, "gradients": 4 / 4, "optimizer state": 12 / 4}


def test_adapters_alone_have_gradients_and_optimizer() -> None:
    adapted = dataclasses.replace(SEVEN, adapters=40_000_000)
    layout = layout_of(HFParallelConfig(activation_checkpointing={"every": 1}), 2, 2, "half")
    found, whole = estimate(adapted, layout, Work(1, 64)).gpu, estimate(SEVEN, layout, Work(1, 64)).gpu
    assert found["weights"] == 2 * SEVEN.parameters + 4 * adapted.adapters
    assert (found["gradients"], found["optimizer state"]) == (4 * adapted.adapters, 8 * adapted.adapters)
    assert (found["activations"], found["recomputed blocks"]) == (whole["activations"], whole["recomputed blocks"])


def test_quantised_blocks_weigh_their_bits_and_what_is_outside_does_not() -> None:
    inside = SEVEN.layers * SEVEN.block
    for layout in (Layout(2, 2), layout_of(HFParallelConfig(pp_size=2), 2, 2, "half")):
        adapted = dataclasses.replace(SEVEN, adapters=40_000_000)
        packed = dataclasses.replace(adapted, block_bits=4.0)
        before, after = (estimate(shape, layout, Work(1, 64)) for shape in (adapted, packed))
        assert before.gpu["weights"] - after.gpu["weights"] == pytest.approx(1.5 * inside / layout.pp_size)
        assert before.loading - after.loading == pytest.approx(2 * 1.5 * inside)
        assert after.gpu["a matrix unpacked"] == 2 * SEVEN.hidden * SEVEN.intermediate


def test_residuals_and_local_steps_are_terms() -> None:
    compressed = layout_of(HFParallelConfig(gradient_compression={"method": "int4"}), 2, 2)
    assert estimate(SEVEN, compressed, Work(1, 1)).gpu["residual of compression"] == 4 * SEVEN.parameters
    for precision in ("fp32", "half"):  # both are kept in fp32
        local = layout_of(HFParallelConfig(local_sgd={"sync_every": 8, "outer_momentum": 0.9}), 2, 2, precision)
        assert estimate(SEVEN, local, Work(1, 1)).gpu["parameters of the last synchronisation"] == 8 * SEVEN.parameters


@pytest.mark.parametrize(("stage", "gradients"), [(1, 2.0), (2, 0.5)])
def test_the_native_optimizer_in_host_memory_leaves_weights_and_gradients(stage: int, gradients: float) -> None:
    config = HFParallelConfig(zero={"stage": stage, "offload_optimizer": "cpu"})
    layout = layout_of(config, 8, 4)
    layout = dataclasses.replace(layout, shards=4)
    assert states(1.0, layout) == {"weights": 2.0, "gradients": gradients, "optimizer state": 0.0}
    assert host_states(8e9, layout) == {"optimizer state and fp32 gradients": 16 * 8e9}
    for pinned in (True, False):
        memory = estimate(SEVEN, dataclasses.replace(layout, pinned=pinned), Work(1, 1))
        assert memory.host_pinned == pinned * memory.host_bytes / 2


def test_inputs_in_host_memory_are_two_at_a_time_on_the_gpu() -> None:
    here = estimate(SEVEN, Layout(2, 2, recompute=recompute(1)), Work(1, 2048))
    config = HFParallelConfig(activation_checkpointing={"every": 1, "offload": True})
    moved = estimate(SEVEN, Layout(2, 2, recompute=config.activation_checkpointing), Work(1, 2048))
    entry = 2 * 2048 * SEVEN.hidden
    assert here.gpu["activations"] == SEVEN.layers * entry
    assert "activations" not in moved.gpu
    assert moved.gpu["recomputed blocks"] - here.gpu["recomputed blocks"] == 2 * entry
    assert moved.host == {ON_HOST: 2 * SEVEN.layers * entry}


def test_every_term_is_printed_and_overhead_is_said_not_to_be_measured() -> None:
    memory = estimate(SEVEN, Layout(2, 2, stage=3, engine="deepspeed", offload_optimizer="cpu"), Work(1, 2048))
    text = "\n".join(describe(memory))
    for name, size in [*memory.gpu.items(), *memory.host.items()]:
        assert any(name in line and f"{size / GB:.2f} GB" in line for line in text.splitlines())
    assert OVERHEAD in text
    assert "pinned blocks are rounded up" in text
    assert tight(memory, memory.gpu_bytes - 1, None)[0].startswith("GPU memory: ")
    assert tight(memory, memory.gpu_bytes, None) == []
    assert "while every rank of a node loads the whole model" in tight(memory, None, 20 * GB)[-1]


def test_more_parallelism_never_needs_more_of_a_gpu() -> None:
    needs = [
        estimate(SEVEN, layout_of(HFParallelConfig(**sizes), 8, 8), Work(8, 2048)).gpu_bytes
        for sizes in ({}, {"tp_size": 2}, {"tp_size": 4}, {"tp_size": 8})
    ]
    assert needs == sorted(needs, reverse=True)


def test_a_shape_is_read_from_a_config_file_and_its_folder(tmp_path: Path) -> None:
    llama(3, 2).save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path))
    assert shape == shape_of(str(tmp_path / "config.json"))
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.head_dim, shape.gated) == (3, 64, 2, 8, True)
    gpt2 = shape_of_config(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97, n_positions=32))
    assert (gpt2.intermediate, gpt2.gated, gpt2.tied) == (256, False, True)


def test_experts_count_by_what_a_token_passes() -> None:
    config = transformers.MixtralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    assert shape_of_config(config).intermediate == 192


def test_a_model_that_cannot_be_found_or_built_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a message cuts a long path short
    with pytest.raises(ConfigError, match=r"model '\./nothing': no config found .*Give a config\.json"):
        shape_of("./nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ConfigError, match=r"model type 'clip' cannot be built .*causal language model"):
        shape_of(str(tmp_path))


def test_the_arithmetic_imports_no_torch() -> None:
    code = "import hf_parallel.memory.report, sys; print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
                            env={"PYTHONPATH": ":".join(filter(None, sys.path))})  # fmt: skip
    assert result.stdout.strip() == "[]"


def test_the_tables_of_the_page_are_those_that_the_code_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    memory_page = importlib.import_module("memory_page")
    text = memory_page.PAGE.read_text(encoding="utf-8")
    assert memory_page.page(text) == text, "run `make memory-page`"
    assert zero_table(7e9, 8)[-1] in text
