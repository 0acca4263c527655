"""The examples of fine-tuning as people launch them: two stages, and what is loaded afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched_examples import first_and_last, launch


pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.timeout(240)]


@pytest.mark.parametrize("example", ["finetune_lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_the_demo_learns_and_exports_an_adapter(example: str, tmp_path: Path) -> None:
    from peft import PeftConfig
    from safetensors.torch import load_file

    if example == "qlora":
        pytest.importorskip("bitsandbytes")
    first, last = first_and_last(launch(example, tmp_path))
    assert last < first - 0.1
    assert PeftConfig.from_pretrained(str(tmp_path / "out")).peft_type == "LORA"
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(saved) == 4 * 7 * 2  # blocks, linear layers, A and B


@pytest.mark.slow
def test_the_demo_of_sft_learns_and_exports_a_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    first, last = first_and_last(launch("sft_trl", tmp_path))
    assert last < first - 0.1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 4


def test_the_demo_of_dpo_prefers_what_is_chosen(tmp_path: Path) -> None:
    printed = launch("dpo_trl", tmp_path)
    first, last = first_and_last(printed)
    assert first == pytest.approx(0.6931, abs=1e-3)  # the adapter begins as no change of the reference
    assert last < first - 0.02
    assert first_and_last(printed, "margin")[1] > 0.05
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
