"""Adapters on bases in 4 and 8 bit: what one process trains, replicas, ZeRO and stages train too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from few_steps import ENV, PP2, TP2, ZERO1, ZERO3, logged, trainer_of
from rank_runner import run_ranks
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.compat.torch_tools import stored_bytes


pytestmark = pytest.mark.long

GROUP = 32  # values with a scale in common
PLAIN = {**ENV, "TORCHDYNAMO_DISABLE": "1"}  # gptqmodel compiles its layers, which takes a minute


def packed_checkpoint(folder: Path, kind: str) -> None:
    """Write a Llama in 4 bit as GPTQ or AWQ do.

    Both pack eight values of 4 bits into a word: GPTQ along the inputs, AWQ along the outputs and in another order.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=99, max_position_embeddings=64)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in LlamaForCausalLM(config).state_dict().items():
        layer, _, key = name.rpartition(".")
        if weight.dim() < 2 or key != "weight" or not layer.startswith("model.layers"):
            tensors[name] = weight
            continue
        grouped = weight.t().contiguous().view(-1, GROUP, len(weight))  # f[groups 32 out]
        scales = grouped.abs().amax(1) / 7
        codes = (grouped / scales[:, None]).round().clamp(-8, 7).add(8).to(torch.int64).flatten(0, 1)  # i[in out]
        order = range(8) if kind == "gptq" else (0, 2, 4, 6, 1, 3, 5, 7)
        eighths = [codes[at::8] if kind == "gptq" else codes[:, at::8] for at in order]
        words = sum(part << (4 * place) for place, part in enumerate(eighths))
        tensors[f"{layer}.qweight"] = torch.from_numpy(words.numpy().astype("uint32").view("int32"))
        zero = 0x77777777 if kind == "gptq" else 0x88888888 - 2**32  # GPTQ keeps one less
        tensors[f"{layer}.qzeros"] = torch.full((len(scales), len(weight) // 8), zero, dtype=torch.int32)
        tensors[f"{layer}.scales"] = scales.half()
        if kind == "gptq":
            tensors[f"{layer}.g_idx"] = torch.arange(len(codes), dtype=torch.int32) // GROUP
    settings = {"quant_method": kind, "bits": 4, "group_size": GROUP}
    settings |= {"sym": True, "desc_act": False} if kind == "gptq" else {"zero_point": True, "version": "gemm"}
    settings["backend"] = "torch" if kind == "gptq" else "torch_awq"  # others are compiled first, for minutes
    config.quantization_config = settings
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def quantised(folder: str, how: int | str) -> Any:
    """Adapters on a base in `how` many bits of bitsandbytes, in 8 bit of torchao, or in 4 bit of its files."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

    options: dict[str, Any] = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    if how == 4:
        kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        options = {"quantization_config": kind}
    elif how == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        options = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    elif how in ("gptq", "awq"):
        options = {"device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    torch.manual_seed(1)
    model = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def kept_of_weights(model: Any) -> int:
    """Layers that keep something of a quantised weight beside it."""
    kept = [
        vars(module).get("quant_state") or getattr(vars(module).get("state"), "CB", None) for module in model.modules()
    ]
    return sum(one is not None for one in kept)


def packed_bytes(model: Any) -> int:
    """Bytes of the blocks' values that no optimizer trains and that are not of the model's dtype."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if not t.requires_grad and t.dim() == 2}
    return sum(
        stored_bytes(t) for t in tensors.values() if t.dtype == torch.int32 or type(t) is not torch.nn.Parameter
    )


def qlora_main(rank: int, world_size: int, jobs: list[tuple[int | str, Any]], base: str, folder: str) -> list[Any]:
    from hf_parallel import ParallelError

    found: list[Any] = []
    for index, (how, parallel) in enumerate(jobs):
        try:
            model = quantised(base, how)
            whole = packed_bytes(model)
            trainer = trainer_of(parallel, Path(folder, str(index)), model=model)
            counts = trainer.model.get_nb_trainable_parameters()
            if parallel is not None and "pp_size" in parallel:
                trainer.evaluate()  # what bitsandbytes does to the weights in it must not last
            trainer.train()
            losses = [entry for entry in logged(trainer) if len(entry) > 1]
            assert trainer.model.get_nb_trainable_parameters() == counts
            trainer.save_model(f"{folder}/{index}/model")
            found.append((losses, kept_of_weights(trainer.model), (packed_bytes(trainer.model), whole)))
        except ParallelError as error:
            found.append(str(error))
    return found


def test_adapters_on_quantised_weights_train_as_on_one_process(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    jobs: list[tuple[int | str, Any]] = [(4, {}), (4, ZERO1), (4, {"zero": {"stage": 2}}), (4, PP2), (8, {}), (8, PP2)]
    jobs += [(4, {**PP2, "schedule": "zbv_zero_bubble"})]
    results = assert_as_on_one_process([4, 8], jobs, [(4, ZERO3), (4, TP2)], tmp_path)
    for index in (3, 5):  # of 28 quantised layers each rank keeps those of its blocks
        assert [result[index][1] for result in results] == [14, 14]
    assert "quantised weights (bitsandbytes) with zero.stage=3" in results[0][-2]
    assert "quantised weights (bitsandbytes) with tp_size=2" in results[0][-1]


@pytest.mark.parametrize(("kind", "package"), [("torchao", "torchao"), ("gptq", "gptqmodel"), ("awq", "gptqmodel")])
def test_adapters_on_weights_of_other_packages_train_as_on_one_process(
    kind: str, package: str, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    layouts: list[dict[str, Any]] = [PP2, {**PP2, "schedule": "zbv_zero_bubble"}]
    if kind != "awq":  # its layers compute in fp16, so that other batches are rounded otherwise
        layouts += [{}, ZERO1, {"zero": {"stage": 2}}]
    jobs: list[tuple[int | str, Any]] = [(kind, layout) for layout in layouts]
    results = assert_as_on_one_process([kind], jobs, [(kind, ZERO3), (kind, TP2)], tmp_path)
    assert f"quantised weights ({kind}) with zero.stage=3" in results[0][-2]
    assert f"quantised weights ({kind}) with tp_size=2" in results[0][-1]
    for result in results:  # what each rank keeps of packed weights, and what the whole model has of them
        kept, whole = result[0][2]
        assert 0.4 * whole < kept < 0.6 * whole


def assert_as_on_one_process(
    hows: list[int | str], jobs: list[tuple[int | str, Any]], refused: list[tuple[int | str, Any]], tmp_path: Path
) -> list[list[Any]]:
    """Returns what each rank found of the jobs and of those that are refused."""
    if hows[0] in ("gptq", "awq"):
        packed_checkpoint(tmp_path / "base", str(hows[0]))
    else:
        tiny.llama().save_pretrained(tmp_path / "base")
    one, out = (
        [(how, None) for how in hows],
        [(str(tmp_path / "base"), str(tmp_path / name)) for name in ("one", "more")],
    )
    expected = run_ranks(qlora_main, 1, one, *out[0], tmp_path=tmp_path, init_group=False, env=PLAIN)[0]
    results = run_ranks(qlora_main, 2, jobs + refused, *out[1], tmp_path=tmp_path, timeout=150, env=PLAIN)
    for index, (how, parallel) in enumerate(jobs):
        reference = hows.index(how)
        for here, there in zip(results[0][index][0], expected[reference][0], strict=True):
            assert here == pytest.approx(there, rel=1e-5, abs=1e-6), (how, parallel)
        saved, adapter = (
            load_file(tmp_path / name / str(at) / "model" / "adapter_model.safetensors")
            for name, at in (("more", index), ("one", reference))
        )
        assert saved.keys() == adapter.keys()
        for key, value in adapter.items():
            assert (saved[key] - value).norm() <= 1e-5 * value.norm(), key
    return results
