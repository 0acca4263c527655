"""Methods of a Trainer's subclass that ours take the place of, and clipping that a library puts on Accelerator: they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import user_steps
from accelerate import Accelerator
from rank_runner import run_ranks
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_parallel import HFParallelCallback


pytestmark = pytest.mark.long


PP2 = {"pp_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, dict[str, Any]] = {"pp2": PP2, "tp2": {"tp_size": 2}, "dp2": {}, "zero3": {"zero": {"stage": 3}}}


class SavesMore(Trainer):
    """Writes a file of its own beside the model."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            Path(output_dir, "own.json").write_text(
                json.dumps(sorted(path.name for path in Path(output_dir).iterdir()))
            )


class SavesByModel(Trainer):
    """As scripts that save adapters do."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        self.model.save_pretrained(output_dir)
        if self.args.should_save:
            Path(output_dir, "own.json").write_text("[]")


class SavesState(Trainer):
    """Writes the weights that it is given under names of its own, too."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        state = self.model.state_dict() if state_dict is None else state_dict
        save_file({f"own.{name}": value.clone() for name, value in state.items()}, Path(output_dir, "own.json"))


class SavesTwice(SavesMore, SavesState):
    pass


class ClipsHalf(Trainer):
    """Clips to a limit of its own."""

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.accelerator.clip_grad_norm_(model.parameters(), 0.05)


class Spoils(TrainerCallback):
    """One gradient of one step is not finite."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            for name, parameter in model.named_parameters():
                if name.endswith("layers.2.mlp.up_proj.weight"):
                    parameter.grad.mul_(float("nan"))


class SkipsNan(Trainer):
    """As ms-swift: while it trains, clipping of every Accelerator drops gradients whose norm is not a number."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        stock = Accelerator.clip_grad_norm_

        def clip_grad_norm_(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = list(parameters)
            norm = stock(self, parameters, *args, **kwargs)
            if isinstance(norm, torch.Tensor) and norm.isnan().item():
                for parameter in parameters:
                    parameter.grad = None
            return norm.nan_to_num()

        Accelerator.clip_grad_norm_ = clip_grad_norm_
        try:
            return super().train(*args, **kwargs)
        finally:
            Accelerator.clip_grad_norm_ = stock


user_steps.KINDS |= {
    "saves_more": (SavesMore, {}),
    "saves_by_model": (SavesByModel, {}),
    "saves_state": (SavesState, {}),
    "saves_twice": (SavesTwice, {}),
    "clips_half": (ClipsHalf, {}),
    "skips_nan": (SkipsNan, {"change": lambda trainer: trainer.add_callback(Spoils())}),
}
KINDS = ("saves_more", "saves_by_model", "saves_state", "saves_twice", "clips_half", "skips_nan")
JOBS: user_steps.Jobs = {f"{kind}_{name}": (kind, layout, "", 0) for kind in KINDS for name, layout in LAYOUTS.items()}


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    return user_steps.runs_of(JOBS, tmp_path_factory.mktemp("methods"), many)


@pytest.mark.parametrize("job", JOBS)
def test_a_method_of_a_subclass_runs(job: str, runs: user_steps.Runs) -> None:
    user_steps.check_job(JOBS, job, runs)
    (mine, *_), kind = runs[1][job], JOBS[job][0]
    folder = Path(mine["folder"])
    if kind.startswith("saves"):
        assert (folder / "own.json").is_file()
    if kind == "saves_more":
        assert {"model.safetensors", "config.json"} <= set(json.loads((folder / "own.json").read_text()))
    if kind == "saves_state":
        written, own = load_file(folder / "model.safetensors"), load_file(folder / "own.json")
        assert own.keys() >= {f"own.{name}" for name in written}
        for name, value in written.items():
            torch.testing.assert_close(own[f"own.{name}"], value, rtol=0, atol=0)


class LoadsMore(Trainer):
    """Notes what is loaded, and has a state of its own."""

    only_model = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save:
            (folder / "own.json").write_text(json.dumps(self.state.global_step))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.loaded = [json.loads(Path(resume_from_checkpoint, "own.json").read_text())]

    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        except NotImplementedError:
            self.loaded = ["not saved"]
        if self.args.should_save:
            Path(output_dir, "more.json").write_text("7")

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint is not None and self.only_model:
            return
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.loaded.append(json.loads(Path(checkpoint, "own.json").read_text()))

    def _load_scaler(self, checkpoint: Any) -> None:
        super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        """As stock does it, without calling that."""
        if checkpoint is not None:
            index = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
            saved = torch.load(Path(checkpoint, f"rng_state{index}.pth"), weights_only=False)
            torch.random.set_rng_state(saved["cpu"])
            self.loaded.append(json.loads(Path(checkpoint, "more.json").read_text()))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.loaded = [*vars(self).get("loaded", []), "best"]


def resumed(
    rank: int, world_size: int, layouts: dict[str, dict[str, Any] | None], folder: str, only_model: bool = False
) -> dict[str, dict[str, Any]]:
    """Three steps, then on from the second to the fifth; what was logged and loaded, by layout."""
    found = {}
    for name, layout in layouts.items():
        for steps in (3, 5):
            trainer = LoadsMore(
                model=tiny.llama(layers=2),
                args=TrainingArguments(
                    f"{folder}/{name}",
                    per_device_train_batch_size=user_steps.rows_on_two(layout) if layout is not None else 8,
                    max_steps=steps,
                    logging_steps=1,
                    learning_rate=1e-2,
                    lr_scheduler_type="constant",
                    adam_epsilon=1e-2 if only_model else 1e-5,  # a first step divides rounding errors by themselves
                    save_strategy="steps",
                    save_steps=1,
                    eval_strategy="steps",
                    eval_steps=1,
                    load_best_model_at_end=True,
                    use_cpu=True,
                    report_to=[],
                    disable_tqdm=True,
                ),
                train_dataset=tiny.rows(48),
                eval_dataset=tiny.rows(8),
                data_collator=tiny.collate,
                callbacks=[HFParallelCallback({}, **layout)] if layout is not None else [],
            )
            trainer.only_model = only_model
            trainer.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-2" if steps == 5 else None)
            session = getattr(trainer.accelerator, "hf_parallel", None)
            if session is not None:
                session.watchdog.stop()
        trainer.save_model(f"{folder}/{name}/final")
        losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
        found[name] = {"losses": losses, "loaded": trainer.loaded}
    return found


@pytest.mark.parametrize("only_model", [False, True])
def test_methods_that_save_and_load_run_around_ours(only_model: bool, tmp_path: Path) -> None:
    where: dict[str, Any] = {"tmp_path": tmp_path, "env": user_steps.ENV}
    (alone,) = run_ranks(resumed, 1, {"one": None}, str(tmp_path), only_model, **where, init_group=False)
    wanted = alone["one"]
    assert wanted["loaded"] == ([2, 7, "best"] if only_model else [2, 2, 7, "best"])
    weights = load_file(tmp_path / "one" / "final" / "model.safetensors")
    layouts = {**LAYOUTS, "zero1": {"zero": {"stage": 1}}}
    for found in run_ranks(resumed, 2, layouts, str(tmp_path), only_model, **where):
        for name, mine in found.items():
            assert mine["loaded"] == wanted["loaded"], name
            assert mine["losses"] == pytest.approx(wanted["losses"], rel=1e-5), name
            for key, value in load_file(tmp_path / name / "final" / "model.safetensors").items():
                assert (value - weights[key]).norm() <= 1e-5 * weights[key].norm(), f"{name}: {key}"
