"""What of a training script cannot be verified is refused with what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import FalconConfig, FalconForCausalLM, LlamaConfig, Trainer, TrainingArguments

from hf_parallel import ConfigError, UnsupportedError, verify
from hf_parallel.memory.shape import shape_of
from hf_parallel.proof.job import Job
from hf_parallel.proof.script import _Run, _without_dropout, train_script
from hf_parallel.proof.start import _to_trace


MODEL_INIT = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=11)
Trainer(model_init=lambda: LlamaForCausalLM(config), args=TrainingArguments("out", use_cpu=True)).train()
"""


ENDED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=11)
class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True
row = torch.arange(6)
args = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=2)
Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=[{"input_ids": row, "labels": row}] * 8, callbacks=[Stop()]).train()
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("print('a loop of its own')", r"never called Trainer\.train\(\)\. A loop of its own cannot be verified"),
        ("import sys; sys.exit(2)", r"exit code 2 before it called(.|\n)*--script-args"),
        (MODEL_INIT, r"makes it itself \(model_init\)\. Give it model="),
        (ENDED, r"took 1 of the 3 optimizer steps that are compared: it goes on from a checkpoint, a callback ends"),
    ],
    ids=["loop", "exit", "model_init", "ends before the steps are trained"],
)
def test_a_script_without_a_plain_training_is_refused(source: str, told: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    make, train, path, words = Trainer.__init__, Trainer.train, list(sys.path), list(sys.argv)
    with pytest.raises(UnsupportedError, match=told):
        train_script(Job("", script=str(script)), tmp_path / "run", layout=False)
    assert (Trainer.__init__, Trainer.train, sys.path, sys.argv) == (make, train, path, words)


def test_what_a_layout_does_otherwise_by_design_is_off_and_the_rate_is_not_warmed_up(tmp_path: Path) -> None:
    args = TrainingArguments(
        "out", per_device_train_batch_size=3, neftune_noise_alpha=5.0, warmup_steps=100, save_steps=1, use_cpu=True
    )
    _Run(Job("", processes=2), tmp_path, False, 0)._settle(args)
    assert (args.neftune_noise_alpha, args.warmup_steps, args.dataloader_drop_last) == (None, 0, True)
    assert (args.max_steps, args.per_device_train_batch_size) == (3, 6)


def test_a_rate_of_dropout_that_is_read_from_the_config_is_zero_too() -> None:
    config = FalconConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=11, hidden_dropout=0.5)
    model = FalconForCausalLM(config)
    _without_dropout(model)
    assert model.config.hidden_dropout == 0.0


def test_the_step_that_differs_is_traced_with_the_batches_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "run.json").write_text('{"rows": 6, "accumulation": 5}')
    traced = _to_trace(Job("", processes=2, script="train.py"), tmp_path, 2)
    assert (traced.steps, traced.rows, traced.accumulation, traced.trace) == (2, 3, 5, True)
    assert not _to_trace(Job("m", rows=3), tmp_path, 2).script


def test_what_a_script_decides_is_no_argument(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ConfigError, match=r"dtype=.bf16. beside script: the script says it"):
        verify(script=script, dtype="bf16")
    with pytest.raises(ConfigError, match=r"give a model or a script, one of the two"):
        verify("config.json", script=script)
    with pytest.raises(ConfigError, match=r"script=no.py: there is no file .*no.py"):
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
