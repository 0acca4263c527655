"""What of a training script cannot be verified is refused with what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, Trainer

from hf_parallel import ConfigError, UnsupportedError, verify
from hf_parallel.memory.shape import shape_of
from hf_parallel.proof.job import Job
from hf_parallel.proof.script import train_script


MODEL_INIT = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=11)
Trainer(model_init=lambda: LlamaForCausalLM(config), args=TrainingArguments("out", use_cpu=True)).train()
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("print('a loop of its own')", r"never called Trainer\.train\(\)\. A loop of its own cannot be verified"),
        ("import sys; sys.exit(2)", r"exit code 2 before it called(.|\n)*--script-args"),
        (MODEL_INIT, r"makes it itself \(model_init\)\. Give it model="),
    ],
    ids=["loop", "exit", "model_init"],
)
def test_a_script_without_a_plain_trainer_is_refused(source: str, told: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    make, train, path, words = Trainer.__init__, Trainer.train, list(sys.path), list(sys.argv)
    with pytest.raises(UnsupportedError, match=told):
        train_script(Job("", script=str(script)), tmp_path / "run", layout=False)
    assert (Trainer.__init__, Trainer.train, sys.path, sys.argv) == (make, train, path, words)


def test_what_a_script_decides_is_no_argument(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ConfigError, match=r"dtype=.bf16. beside script: the script says it"):
        verify(script=script, dtype="bf16")
    with pytest.raises(ConfigError, match=r"give a model or a script, one of the two"):
        verify("config.json", script=script)
    with pytest.raises(ConfigError, match=r"script=no.py: there is no such file"):
        verify(script="no.py")


def test_modeling_code_that_a_folder_brings_is_refused_and_elsewhere_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=97
    )
    config.auto_map = {"AutoModelForCausalLM": "modeling_mine.MyLlama"}
    config.save_pretrained(tmp_path)
    told = r"brings modeling code of its own \(auto_map: 'modeling_mine\.MyLlama'\).*--script train\.py"
    for model in (tmp_path, config):
        with pytest.raises(ConfigError, match=told):
            verify(model, {"pp_size": 2})
    for _ in range(2):
        assert shape_of(str(tmp_path)).layers == 2
    assert caplog.text.count("which is not run. Numbers are of transformers' own class of model type 'llama'") == 1
