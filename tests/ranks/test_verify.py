"""`hf_parallel.verify` on models nobody cut before, with and without bugs put into the layout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runner import run_ranks
from torch import nn
from transformers import LlamaConfig, MixtralConfig
from typer.testing import CliRunner

from hf_parallel import ConfigError, verify
from hf_parallel.cli.main import app
from hf_parallel.proof.start import main
from hf_parallel.proof.verify import AS_ONE, prove


pytestmark = pytest.mark.timeout(240)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}
CONFIG = LlamaConfig(**SIZES, tie_word_embeddings=True)


def halve_a_weight(trainer: Any) -> None:
    """A bug: one replica's, or stage's, up projection has other values."""
    mesh = trainer.accelerator.hf_parallel.mesh
    if mesh.rank == 1:
        for name, parameter in trainer.model.named_parameters():
            if name == "model.layers.1.mlp.up_proj.weight":
                parameter.data.mul_(0.5)


class Louder(nn.SiLU):
    def forward(self, hidden: Any) -> Any:
        return 1.1 * super().forward(hidden)


def change_a_part(trainer: Any) -> None:
    """A bug: what the second rank of a sequence has in an MLP is larger."""
    if trainer.accelerator.hf_parallel.mesh.sp_rank == 1:
        trainer.model.get_submodule("model.layers.1.mlp").act_fn = Louder()


def double_a_router(trainer: Any) -> None:
    """A bug: the last stage's router has other values."""
    for name, parameter in trainer.model.named_parameters():
        if "layers.1" in name and ("gate." in name or "router" in name):
            parameter.data.mul_(2.0)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        pytest.param({"pp_size": 2, "num_microbatches": 4}, {}, id="pp2", marks=pytest.mark.long),
        pytest.param({"tp_size": 2}, {}, id="tp2", marks=pytest.mark.slow),
        pytest.param({"zero": {"stage": 1}}, {}, id="zero1", marks=pytest.mark.slow),
        pytest.param({"zero": {"stage": 3}}, {"accumulation": 2}, id="zero3", marks=pytest.mark.slow),
        pytest.param({"sp_size": 2}, {"length": 15, "rows": 1}, id="sp2", marks=pytest.mark.slow),
        pytest.param({"sp_size": 2, "tp_size": 2}, {}, id="sp2xtp2", marks=pytest.mark.slow),
    ],
)
def test_layouts_agree_with_one_process(settings: dict[str, Any], more: dict[str, Any]) -> None:
    verdict = verify(CONFIG, settings, steps=2, **more)
    assert verdict.ok, verdict
    assert verdict.refused is None
    assert verdict.first_divergence is None
    assert verdict.grad_max_rel is not None
    assert 0 < verdict.grad_max_rel <= 1e-5
    assert verdict.loss_max_rel is not None
    assert verdict.loss_max_rel <= 1e-5
    assert verdict.missing_gradients == []


@pytest.fixture
def bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in this file can be put into ranks."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]))


def main_here(rank: int, world_size: int, folder: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))  # bugs are in this file
    main(Path(folder))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process that starts the runs has its imports done; the tests of the command and of scripts start a new one."""

    def start(folder: Path) -> str:
        run_ranks(main_here, 1, str(folder), tmp_path=tmp_path, timeout=200, init_group=False, env=AS_ONE)
        return ""

    monkeypatch.setattr(prove, "__defaults__", (start,))


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_a_bug_is_found_and_its_module_named() -> None:
    verdict = verify(CONFIG, {"pp_size": 2, "num_microbatches": 2}, steps=1, tamper="test_verify:halve_a_weight")
    assert not verdict.ok
    assert verdict.first_divergence is not None
    place = {"module": "model.layers.1.mlp.up_proj", "microbatch": None, "kind": "forward"}  # before any microbatch
    assert verdict.first_divergence == place


def decay_of_one_rank(trainer: Any) -> None:
    """A bug that hf_parallel notices by itself, before the first step is over."""
    if trainer.accelerator.hf_parallel.mesh.rank == 1:
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_what_a_rank_notices_in_the_first_step_is_a_verdict() -> None:
    config = LlamaConfig(
        **{**SIZES, "num_hidden_layers": 4}
    )  # two blocks a stage: their groups are known to be the same
    verdict = verify(config, {"pp_size": 2, "num_microbatches": 2}, steps=1, tamper="test_verify:decay_of_one_rank")
    assert not verdict.ok
    assert verdict.refused is None
    assert verdict.stopped is not None
    assert "weight_decay of parameter group 0" in verdict.stopped
    assert verdict.grad_max_rel is None  # none was compared
    assert verdict.first_divergence is not None
    assert verdict.first_divergence["kind"] == "optimizer"
    assert verdict.worst[0]["what"] == "weight_decay"


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_a_bug_in_a_part_of_each_row_is_found_and_its_module_named() -> None:
    verdict = verify(CONFIG, {"sp_size": 2}, steps=1, tamper="test_verify:change_a_part")
    assert not verdict.ok
    assert verdict.layout == "sp2"
    first = {"module": "model.layers.1.mlp.down_proj", "microbatch": 0, "kind": "forward"}  # reads what is too large
    assert verdict.first_divergence == first


ROUTED = MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        pytest.param({"pp_size": 2, "num_microbatches": 3}, 2, id="pp2", marks=pytest.mark.slow),
        pytest.param({"pp_size": 2, "num_microbatches": 2}, 4, id="pp2xdp2", marks=pytest.mark.slow),
        pytest.param({}, 2, id="dp2", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2}, 2, id="tp2", marks=pytest.mark.slow),
        pytest.param({"ep_size": 2}, 2, id="ep2", marks=pytest.mark.slow),
    ],
)
def test_a_routers_loss_is_compared_with_one_of_the_same_parts(settings: dict[str, Any], processes: int) -> None:
    verdict = verify(ROUTED, settings, steps=2, processes=processes)
    assert verdict.ok, verdict


@pytest.mark.slow
@pytest.mark.usefixtures("bugs")
def test_a_bug_in_a_model_with_a_routers_loss_is_found_and_placed() -> None:
    tamper = "test_verify:double_a_router"
    verdict = verify(ROUTED, {"pp_size": 2, "num_microbatches": 2}, steps=1, rows=3, tamper=tamper)
    assert not verdict.ok
    assert verdict.first_divergence is not None
    assert "layers.1.mlp" in verdict.first_divergence["module"]
    assert verdict.first_divergence["kind"] == "forward"


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_a_model_that_one_process_cannot_train_is_refused_with_its_error() -> None:
    refused = verify(LlamaConfig(vocab_size=10, pad_token_id=50), {"pp_size": 2}, steps=1).refused
    assert refused is not None
    assert "one process without hf_parallel cannot train it either" in refused


@pytest.mark.long
def test_the_command_writes_its_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CONFIG.save_pretrained(tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    words = "verify models/config.json --dp 2 --steps 1 --layers 1 --random-weights --json verdict.json"
    ended = CliRunner().invoke(app, words.split())
    assert ended.exit_code == 0, ended.output
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["ok"]
    assert verdict["layout"] == "dp2"
    assert verdict["model_type"] == "llama"


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_paths_are_those_of_the_folder_in_which_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    CONFIG.save_pretrained("models")
    Path("made.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    settings = {"pp_size": 2, "num_microbatches": 2, "schedule": "csv", "pipeline": {"schedule_file": "made.csv"}}
    verdict = verify("models/config.json", settings, steps=1, random_weights=True)
    assert verdict.ok, verdict


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_refusals_have_a_code_of_their_own(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    ended = CliRunner().invoke(app, ["verify", str(tmp_path), "--pp", "4", "--microbatches", "4", "--json", "-"])
    assert ended.exit_code == 3
    assert "pp_size x virtual stages = 4 stages need" in json.loads(ended.output)["refused"]


def test_what_cannot_be_verified_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"gradient_compression\.method=bf16: by design"):
        verify(CONFIG, {"gradient_compression": {"method": "bf16"}})
    with pytest.raises(
        ConfigError, match=r"steps=0: it is an integer of 1 or more(.|\n)*dtype=.int8.: expected one of"
    ):
        verify(CONFIG, {"pp_size": 2}, steps=0, dtype="int8")
    with pytest.raises(ConfigError, match=r"processes=3: it is a multiple of tp_size \* pp_size = 1 \* 2 = 2"):
        verify(CONFIG, {"pp_size": 2}, processes=3)
    with pytest.raises(
        ConfigError, match=r"processes=3: it is a multiple of tp_size \* pp_size \* sp_size = 1 \* 1 \* 2 = 2"
    ):
        verify(CONFIG, {"sp_size": 2}, processes=3)
    with pytest.raises(ConfigError, match=r"processes=3 with ep_size=2: 2 replicas of 1 ranks .* multiple of 2\."):
        verify(ROUTED, {"ep_size": 2}, processes=3)


@pytest.mark.slow
def test_bf16_is_judged_by_the_spread_of_one_process() -> None:
    verdict = verify(CONFIG, {"tp_size": 2}, steps=1, dtype="bf16")
    assert verdict.ok
    assert verdict.grad_max_rel is not None
    assert verdict.grad_max_rel > 1e-5
    assert all(torch.isfinite(torch.tensor(each["allowed"])) for each in verdict.worst)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"pp_size": 2, "num_microbatches": 2}, {"tp_size": 2}], ids=["pp2", "tp2"])
def test_fp16_agrees(settings: dict[str, Any]) -> None:
    verdict = verify(CONFIG, settings, steps=1, dtype="fp16")
    assert verdict.ok, verdict
    assert verdict.grad_max_rel is not None
    assert 1e-5 < verdict.grad_max_rel < 1e-2  # products are rounded to fp16


@pytest.mark.slow
@pytest.mark.usefixtures("bugs")
def test_fp16_hides_no_bug() -> None:
    verdict = verify(CONFIG, {"tp_size": 2}, steps=1, dtype="fp16", tamper="test_verify:halve_a_weight")
    assert not verdict.ok
    place = verdict.first_divergence
    assert place is not None
    assert (place["module"], place["kind"]) == ("model.layers.1.mlp.up_proj", "forward")


SCRIPT = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from hf_parallel import HFParallelCallback

set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=61,
    attention_dropout=0.1,
))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 61, (64, 12))]
args = TrainingArguments("out", per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=3,
                         learning_rate=float(sys.argv[1]), save_steps=1)
Trainer(model=model, args=args, train_dataset=rows, callbacks=[HFParallelCallback()]).train()
raise SystemExit("what comes after the training is not run")
"""


ROUTED_SCRIPT = SCRIPT.replace("Llama", "Mixtral").replace(
    "vocab_size=61", "vocab_size=61, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5"
)


@pytest.mark.long
@pytest.mark.usefixtures("bugs")
def test_where_a_script_parts_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    verdict = verify(script=script, script_arguments=["1e-3"], steps=1, tamper="test_verify:halve_a_weight")
    assert not verdict.ok
    assert verdict.first_divergence is not None
    assert verdict.first_divergence["module"] == "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("source", "settings", "processes"),
    [
        pytest.param(SCRIPT, {"zero": {"stage": 1}}, 2, marks=pytest.mark.slow, id="llama"),
        pytest.param(ROUTED_SCRIPT, {"pp_size": 2, "num_microbatches": 2}, 2, marks=pytest.mark.long, id="router"),
        pytest.param(ROUTED_SCRIPT, {"pp_size": 2, "num_microbatches": 2}, 4, marks=pytest.mark.slow, id="router_dp2"),
    ],
)
def test_a_script_is_verified_as_it_is(source: str, settings: dict[str, Any], processes: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    verdict = verify(script=script, script_arguments=["1e-3"], settings=settings, steps=2, processes=processes)
    assert verdict.refused is None
    assert verdict.ok, verdict
    assert verdict.model_type == ("llama" if source is SCRIPT else "mixtral")
    assert verdict.grad_max_rel is not None
    assert 0 < verdict.grad_max_rel <= 1e-5
    assert not (tmp_path / "out").exists()
