"""What may differ is derived from runs of one process that rounding alone drives apart, choices of experts included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import BartConfig, BltConfig, MistralConfig, Zamba2Config, default_data_collator

from hf_parallel.cli.verify import _show
from hf_parallel.errors import UnsupportedError
from hf_parallel.proof import start
from hf_parallel.proof.compare import (
    AGAIN,
    EXACT,
    MARGIN,
    NEAR,
    PERTURBED,
    Comparison,
    Difference,
    _numbers,
    perturbed_of,
)
from hf_parallel.proof.job import Job
from hf_parallel.proof.ties import Ties, noise_of
from hf_parallel.proof.train import _cut, batches_of, build_model, train
from hf_parallel.proof.verify import Verdict, job_of
from hf_parallel.proof.watch import Watch, clipping_exactly


def test_choices_that_are_as_near_as_rounding_are_turned_and_others_stay(tmp_path: Path) -> None:
    rows = torch.tensor([[0.5, 0.5002, float("-inf")], [0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
    for name, seed in (("reference", None), ("perturbed1", 0)):
        (tmp_path / name).mkdir()
        noted = Ties()
        with noted:
            moved = rows if seed is None else rows + 1e-4
            chosen = torch.topk(moved, 1).indices
            assert chosen[:, 0].tolist() == [1, 0, 0]
            moved.topk(2, dim=-1)
        noted.write(tmp_path / name)
    noise = noise_of(tmp_path / "reference", tmp_path / "perturbed1")
    assert noise == [pytest.approx(1e-4, rel=1e-2)] * 2
    scores = rows.clone().requires_grad_()
    with Ties([noise[0]] * 4):
        values, chosen = torch.topk(scores, 1, dim=-1)
        assert chosen[:, 0].tolist() == [0, 0, 0]
        assert scores.topk(k=2).indices.sort().values.tolist() == [[0, 1]] * 3
        assert torch.topk(-rows[:, :2], 1, -1, False).indices[:, 0].tolist() == [0, 0, 0]
        assert torch.topk(rows.T[:2], 1, 0).indices[0].tolist() == [0, 0, 0]
        assert torch.topk(scores, 1).indices[0].item() == 1  # of this one nothing is known
        assert torch.topk(torch.arange(3), 1).indices.item() == 2
    assert values.equal(scores.gather(-1, chosen))  # what is chosen keeps its score
    values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.sum() == 3


def test_of_scores_that_were_made_in_bf16_those_that_are_two_units_apart_are_near(tmp_path: Path) -> None:
    unit = 2.0**-8  # in the last place of scores from 0.5 to 1
    rows = torch.tensor([[0.75, 0.75 - unit], [0.75, 0.75 - 3 * unit], [0.75, 0.625], [0.75, 0.625]])
    moved = rows + torch.tensor([0.0, 0.0, unit, 0.0])[:, None]  # that of most rows is the same number in bf16
    for name, scores in (("reference", rows), ("perturbed1", moved)):
        (tmp_path / name).mkdir()
        noted = Ties()
        with noted:
            torch.topk(scores, 1)
            torch.topk(rows, 1)  # none moves
        noted.write(tmp_path / name)
    noise = noise_of(tmp_path / "reference", tmp_path / "perturbed1")
    with Ties(noise):
        for _ in range(2):
            assert torch.topk(rows, 1).indices[:, 0].tolist() == [1, 0, 0, 0]


def test_runs_without_choices_leave_no_scores(tmp_path: Path) -> None:
    noted = Ties()
    with noted:
        torch.ones(3).sort()
    noted.write(tmp_path)
    assert noise_of(tmp_path, tmp_path) == []


def run(folder: Path, losses: list[float]) -> None:
    folder.mkdir()
    logged: list[dict[str, Any]] = [{"loss": loss} for loss in losses]
    (folder / "run.json").write_text(json.dumps({"logged": logged}))


def test_what_a_number_may_differ_by_is_its_spread_over_all_steps(tmp_path: Path) -> None:
    run(tmp_path / "reference", [2.0, 2.0])
    run(tmp_path / "perturbed1", [2.0, 2.002])  # by chance no difference in the first step
    run(tmp_path / "perturbed2", [2.0, 1.999])
    run(tmp_path / "rank0", [2.001, 2.1])
    first, second = _numbers(Job("", steps=2), tmp_path)
    assert first.allowed == second.allowed == pytest.approx(MARGIN * 1e-3)
    assert (first.excess <= 1, second.excess > 1) == (True, True)
    run(tmp_path / "rank1", [2.001, 2.1])
    for place in ("perturbed1", "perturbed2"):
        (tmp_path / place / "run.json").write_text((tmp_path / "reference" / "run.json").read_text())
    assert {each.allowed for each in _numbers(Job("", steps=2), tmp_path)} == {EXACT}


def test_one_process_clips_by_a_norm_that_is_right_for_large_tensors() -> None:
    weight = torch.nn.Parameter(torch.zeros(2**21))
    weight.grad = 1e-4 * torch.randn(2**21, generator=torch.Generator().manual_seed(0))
    bare = torch.nn.Parameter(torch.zeros(2))
    wanted = weight.grad.double().norm().item()
    own = torch.nn.utils.clip_grad_norm_
    with clipping_exactly():
        norm = torch.nn.utils.clip_grad_norm_(iter([weight, bare]), 0.01)
    assert norm.item() == pytest.approx(wanted, rel=1e-7)
    assert weight.grad.double().norm().item() == pytest.approx(0.01, rel=1e-4)  # clipped by norm + 1e-6
    assert torch.nn.utils.clip_grad_norm_ is own
    with clipping_exactly():
        assert torch.nn.utils.clip_grad_norm_([bare], 0.01).item() == 0.0


def windowed(folder: Path, **more: Any) -> Job:
    MistralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32000,
        **more,
    ).save_pretrained(folder)
    return Job(str(folder / "config.json"), random_weights=True, length=12, rows=3)


@pytest.mark.parametrize(("window", "wanted"), [(4096, 6), (12, 6), (5, 5), (None, None)])
def test_windows_are_shorter_than_the_rows(window: int | None, wanted: int | None, tmp_path: Path) -> None:
    config: Any = build_model(windowed(tmp_path, sliding_window=window)).config
    assert config.sliding_window == wanted


def test_the_ends_of_the_vocabulary_are_read_and_are_labels(tmp_path: Path) -> None:
    job = windowed(tmp_path, pad_token_id=7)
    rows = batches_of(job, build_model(job))
    read = {token for row in rows[: job.rows] for token in row["input_ids"][:-1][row["labels"][:-1] >= 0].tolist()}
    assert {0, 7, 31999} <= read


@pytest.mark.parametrize(
    ("kind", "more", "wanted"),
    [
        (BartConfig, {"d_model": 16, "decoder_layers": 4, "encoder_layers": 2}, "decoder_layers"),
        (Zamba2Config, {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}, "num_hidden_layers"),
    ],
)
def test_of_each_kind_of_config_the_first_blocks_are_left(kind: Any, more: dict[str, Any], wanted: str) -> None:
    config = kind(**more)
    config = _cut(config, 2)
    assert getattr(config, wanted) == 2
    assert len(getattr(config, "layers_block_type", "ab")) == 2


def test_a_config_without_a_number_of_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"layers=2: a config of type blt has no number of blocks"):
        _cut(BltConfig(), 2)


def test_few_steps_are_too_few_in_half_precision(tmp_path: Path) -> None:
    config = MistralConfig(num_hidden_layers=2)
    for dtype, steps, wanted in (("bf16", 1, 3), ("fp16", 4, 4), ("fp32", 1, 1)):
        assert job_of(config, {"pp_size": 2}, tmp_path, dtype=dtype, steps=steps).steps == wanted


def test_a_number_that_is_not_finite_is_none_in_json() -> None:
    found = Verdict("m", "pp2", loss_max_rel=float("nan"), worst=[{"relative": float("inf"), "step": 1}]).to_json()
    assert (found["loss_max_rel"], found["worst"]) == (None, [{"relative": None, "step": 1}])


def test_what_was_not_compared_has_no_largest_difference() -> None:
    found = Comparison([Difference("gradient", 1, "a", 0, 1e-7, 1e-5)], [])
    assert (found.largest("gradient"), found.largest("loss", "grad_norm")) == (1e-7, None)


@pytest.mark.parametrize("keeps", [False, True], ids=["alone", "kept"])
@pytest.mark.parametrize(("excess", "runs"), [(NEAR / 2, AGAIN), (NEAR * 2, PERTURBED)])
def test_what_is_near_the_limit_is_compared_with_more_runs_of_one_process(
    excess: float, runs: int, keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout's loss is off by `excess` times what the first two runs allow, and by less than what a later one does."""
    job = job_of(MistralConfig(), {"pp_size": 2}, tmp_path, steps=1)
    job.dump(tmp_path / start.JOB)

    def train_one(job: Job, folder: Path, number: int) -> Any:
        return lambda: run_as(folder, 1.0 + (1e-4 if number <= PERTURBED else 1e-3) * (number > 0))

    def train_layout(job: Job, folder: Path) -> bool:
        for rank in range(job.processes):
            run_as(folder / f"rank{rank}", 1.0 + excess * MARGIN * 1e-4)
        return True

    def run_as(folder: Path, loss: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / start.RUN).write_text(
            json.dumps({"logged": [{"loss": loss}], "shared": [], "rows": 8, "accumulation": 1})
        )
        for what in ("gradients-0", "parameters"):
            (folder / f"{what}.json").write_text(json.dumps({"absent": [], "pieces": {}}))
            save_file({}, folder / f"{what}.safetensors")

    def run_here(folder: Path, runs: dict[str, Any], home: str | None = None) -> bool:
        for one in runs.values():
            one()
        return True

    traced: list[int] = []
    monkeypatch.setattr(start, "_perturbed", train_one)
    monkeypatch.setattr(start, "_layout", train_layout)
    monkeypatch.setattr(start, "_run_all", run_here)
    monkeypatch.setattr(start, "first_divergence", lambda *given: traced.append(1) or {})
    start.main(tmp_path, tmp_path / "kept" if keeps else None)
    assert len(perturbed_of(tmp_path / start.COMPARED)) == runs
    assert bool(traced) == (runs == PERTURBED)
    assert Comparison.load(tmp_path / start.JUDGED).ok == (runs == AGAIN)


@pytest.mark.parametrize(
    ("dtype", "number", "wanted"), [("bf16", 0, 0), ("bf16", 2, 0), ("bf16", 3, 1), ("fp32", 3, 0)]
)
def test_later_runs_in_half_precision_see_the_rows_of_each_microbatch_by_themselves(
    dtype: str, number: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def run(watch: Any, trainer: Any, given: Any) -> None:
        batch = default_data_collator([trainer.train_dataset[row] for row in range(4)])
        trainer.model.model.register_forward_hook(lambda *_: sizes.append(1))
        trainer.model(**batch, num_items_in_batch=torch.tensor(40))

    monkeypatch.setattr(Watch, "run", run)
    config = MistralConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2, vocab_size=50
    )
    settings = {"pp_size": 2, "num_microbatches": 2}
    train(
        job_of(config, settings, tmp_path, rows=4, dtype=dtype, layers=1),
        tmp_path / "run",
        layout=False,
        perturbed=number,
    )
    assert len(sizes) == 1 + wanted


def test_the_table_of_differences_shows_every_name_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # as where output goes to a file
    name = "model.layers.27.mlp.experts.31.gate_up_proj.base_layer.weight"
    worst = {"what": "gradient", "step": 1, "name": name, "rank": 0, "relative": 1e-3, "allowed": 1e-5}
    _show(Verdict("m", "pp2", worst=[worst]))
    cells = [
        line.split("\u2502")[3].strip() for line in capsys.readouterr().out.splitlines() if line.count("\u2502") > 3
    ]
    assert "".join(cells) == name
