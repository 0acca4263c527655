"""Models beside and after the first one: a fresh one by `model_init`, a teacher, a reference model."""

from __future__ import annotations

import copy
import io
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from few_steps import ENV, PP2, PP2_TP2, TP2, ZERO1, ZERO3, logged, trainer_of
from rank_runner import run_ranks
from torch.utils.data import DataLoader
from transformers import GPT2ForQuestionAnswering, GPT2ForSequenceClassification

from hf_parallel.errors import UnsupportedError


pytestmark = pytest.mark.long


# -- model_init ------------------------------------------------------------------------------------------------------


def fresh() -> Any:
    """Another model at each call, drawn from the seed that the Trainer sets."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"intermediate_size": 64, "num_hidden_layers": 4, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**tiny.SMALL, **sizes))


def init_main(rank: int, world_size: int, layouts: list[Any], folder: str) -> list[Any]:
    found = []
    for index, parallel in enumerate(layouts):
        trainer = trainer_of(parallel, Path(folder, str(index)), model_init=fresh)
        first = trainer.evaluate()["eval_loss"]
        trainer.train()
        middle = trainer.evaluate()["eval_loss"]
        losses = logged(trainer)
        trainer.train()  # stock begins again with a new model
        again = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.save_model(f"{folder}/{index}/model")
        found.append([[first, middle], losses, again, trainer.evaluate()["eval_loss"]])
        logged(trainer)
    return found


@pytest.mark.parametrize(
    ("size", "layouts"),
    [(2, [{}, ZERO1, ZERO3, PP2, TP2]), (4, [PP2])],
    ids=["two", "four"],
)
def test_model_init_may_be_evaluated_then_trained_and_trained_again(size: int, layouts: Any, tmp_path: Path) -> None:
    expected = run_ranks(init_main, 1, [None], str(tmp_path / "one"), tmp_path=tmp_path, init_group=False, env=ENV)[0][
        0
    ]
    results = run_ranks(init_main, size, layouts, str(tmp_path / "more"), tmp_path=tmp_path, timeout=150, env=ENV)
    for parallel, found in zip(layouts, results[0], strict=True):
        for mine, other in zip(found, expected, strict=True):
            for a, b in zip(
                np.atleast_1d(np.array(mine, dtype=object)), np.atleast_1d(np.array(other, dtype=object)), strict=True
            ):
                assert a == pytest.approx(b, abs=1e-5), parallel


def again_main(rank: int, world_size: int, layouts: list[Any], folder: str) -> list[str]:
    """Two Trainers on one model, one after the other, as notebooks have them."""
    found = []
    for index, parallel in enumerate(layouts):
        model = tiny.llama(tied=True, layers=2)
        trainer_of(parallel, Path(folder, str(index)), model=model).train()
        try:
            trainer_of(parallel, Path(folder, f"{index}-again"), model=model).train()
            found.append("")
        except UnsupportedError as error:
            found.append(str(error))
    return found


def test_a_second_trainer_of_a_model_in_parts_is_refused_by_name(tmp_path: Path) -> None:
    layouts = [{}, ZERO1, ZERO3, PP2, TP2]
    for found in run_ranks(again_main, 2, layouts, str(tmp_path), tmp_path=tmp_path, timeout=150, env=ENV):
        assert found[:2] == ["", ""]
        for text in found[2:]:
            assert re.match(
                r"this LlamaForCausalLM is parallelized already, by another Trainer or Accelerator", text
            ), text


# -- models beside the trained one -----------------------------------------------------------------------------------


def num_hows(parallel: dict[str, Any] | None) -> int:
    """Shards round the products of bf16, in which one of the teachers is, otherwise."""
    return 2 if "tp_size" in (parallel or {}) else 3


def distil_main(rank: int, world_size: int, layouts: list[Any], folder: str) -> list[Any]:
    """A teacher, prepared in the ways that scripts do, gives the targets of a student."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel import HFParallelPlugin, from_pretrained
    from hf_parallel.settings.config import HFParallelConfig

    found = []
    for parallel in layouts:
        hows = ("together", "evaluation", "first")
        for how in hows[: num_hows(parallel)]:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            options = {} if parallel is None else {"parallelism_config": HFParallelPlugin({}, **parallel)}
            accelerator = Accelerator(cpu=True, **options)
            # One of another class; and one of the student's with other values, which each rank reads its part of.
            student, teacher = tiny.llama(), tiny.gpt2().eval()
            if how == "first":
                teacher.bfloat16()  # no optimizer wants it in fp32
            if how == "evaluation":
                teacher = from_pretrained(folder, HFParallelConfig().with_overrides(**(parallel or {})))
            whole = tiny.bytes_here(teacher)
            optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3, eps=1e-5)
            loader = DataLoader(tiny.rows(32), batch_size=8 // accelerator.num_processes, collate_fn=tiny.collate)
            if how == "evaluation":
                student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
                teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
            else:
                teacher.requires_grad_(False)
                if how == "first":
                    teacher = accelerator.prepare(teacher)
                    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
                else:
                    teacher, student, optimizer, loader = accelerator.prepare(teacher, student, optimizer, loader)
            share = tiny.bytes_here(teacher) / whole
            history = []
            for index, inputs in enumerate(loader):
                with torch.set_grad_enabled(index > 0):  # a loop may forget that nothing of the teacher is trained
                    taught = teacher(input_ids=inputs["input_ids"]).logits
                assert share == 1 or not taught.requires_grad
                target = taught.detach().float().softmax(-1)  # from stages it comes in fp32
                logits = student(input_ids=inputs["input_ids"]).logits
                loss = -(target * logits.log_softmax(-1)).sum(-1).mean(-1).mean()
                accelerator.backward(loss)
                history.append(float(accelerator.clip_grad_norm_(student.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            if parallel == PP2:
                with pytest.raises(UnsupportedError, match=r"output_hidden_states in a call of .* Leave it out of"):
                    teacher(input_ids=inputs["input_ids"], output_hidden_states=True)
            state = accelerator.get_state_dict(student)
            if parallel is not None:
                accelerator.hf_parallel.watchdog.stop()
            weights = {k: v.detach().numpy().copy() for k, v in state.items()} if rank == 0 else {}
            state = accelerator.get_state_dict(teacher)
            kept = {k: v.detach().float().numpy().copy() for k, v in state.items()} if rank == 0 else {}
            found.append((history, weights, kept, hows.index(how), share))
    return found


@pytest.mark.parametrize(
    ("size", "layouts"),
    [(2, [{}, ZERO1, {"zero": {"stage": 2}}, ZERO3, PP2, TP2]), (4, [PP2_TP2])],
    ids=["two", "four"],
)
def test_a_frozen_teacher_is_cut_and_sharded_like_the_student(size: int, layouts: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "teacher")
    tiny.moved(tiny.llama(), 0.02).save_pretrained(folder)
    expected = run_ranks(distil_main, 1, [None], folder, tmp_path=tmp_path, init_group=False, env=ENV)[0]
    results = run_ranks(distil_main, size, layouts, folder, tmp_path=tmp_path, timeout=120, env=ENV)
    assert len(results[0]) == sum(map(num_hows, layouts))
    for history, weights, taught, how, _ in results[0]:
        norms, *references, _, _ = expected[how]
        np.testing.assert_allclose(history, norms, rtol=1e-5)
        for state, reference in zip((weights, taught), references, strict=True):
            assert state.keys() <= reference.keys()
            for key, tensor in state.items():
                assert np.linalg.norm(tensor - reference[key]) <= 1e-5 * np.linalg.norm(reference[key]), key
    for index, parallel in enumerate(each for each in layouts for _ in range(num_hows(each))):
        of_ranks = [result[index][-1] for result in results]
        whole = parallel in ({}, ZERO1, {"zero": {"stage": 2}})
        assert (min(of_ranks) == 1) if whole else (max(of_ranks) <= 1.25 / size), (parallel, of_ranks)


def refused_main(rank: int, world_size: int) -> dict[str, str]:
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin, ParallelError

    found: dict[str, str] = {}

    def refused(name: str, action: Any) -> None:
        try:
            action()
        except ParallelError as error:
            found[name] = str(error)

    accelerator, lines = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **TP2)), io.StringIO()
    logging.getLogger("hf_parallel").addHandler(logging.StreamHandler(lines))
    student, teacher = tiny.llama(), tiny.gpt2().requires_grad_(False)
    shared = tiny.llama()
    shared.model.embed_tokens = student.model.embed_tokens
    shared.requires_grad_(False)
    refused("shared", lambda: accelerator.prepare(shared, student))
    accelerator.prepare(teacher, student)
    refused("shared later", lambda: accelerator.prepare_model(shared, evaluation_mode=True))
    refused("second", lambda: accelerator.prepare(tiny.gpt2()))
    alien = torch.nn.Linear(3, 3)
    refused(
        "foreign", lambda: accelerator.prepare(torch.optim.SGD([*student.parameters(), *alien.parameters()], lr=1.0))
    )
    refused("gradient", lambda: teacher(inputs_embeds=torch.ones(1, 2, 32, requires_grad=True)))
    refused("trained", lambda: accelerator.prepare(teacher.requires_grad_(True)))
    padded = copy.deepcopy(teacher.config)
    padded.pad_token_id = 0
    judge, rows = GPT2ForSequenceClassification(padded).eval(), torch.arange(12).view(2, 6)
    scores = judge(input_ids=rows).logits
    accelerator.prepare_model(judge, evaluation_mode=True)
    torch.testing.assert_close(judge(input_ids=rows).logits, scores.detach(), rtol=1e-5, atol=1e-6)
    scorer = GPT2ForQuestionAnswering(teacher.config).eval()
    before, ids = {name: one.clone() for name, one in scorer.state_dict().items()}, torch.arange(6)[None]
    scores = scorer(input_ids=ids).start_logits
    assert accelerator.prepare_model(scorer, evaluation_mode=True) is scorer
    assert all(torch.equal(one, before[name]) for name, one in scorer.state_dict().items())
    assert torch.equal(scorer(input_ids=ids).start_logits, scores)
    assert all(parameter.requires_grad for parameter in scorer.parameters())
    accelerator.hf_parallel.watchdog.stop()
    return found | {"lines": lines.getvalue()}


def test_what_cannot_stand_beside_a_cut_model_is_refused_by_name(tmp_path: Path) -> None:
    results = run_ranks(refused_main, 2, tmp_path=tmp_path, env=ENV)
    in_parts = "GPT2LMHeadModel, a model for inference: tensor parallel: 9[0-9]% of the parameters sharded, .* compared with the whole model"
    assert re.search(in_parts, results[0]["lines"])
    assert "GPT2ForSequenceClassification, a model for inference: tensor parallel: " in results[0]["lines"]
    whole = r"GPT2ForQuestionAnswering, a model for inference, stays whole on every rank: 0.00 GB of each \(.* is made for Question"
    assert re.search(whole, results[0]["lines"])
    for found in results:
        for name in ("shared", "shared later"):
            assert (
                "model.embed_tokens.weight (1 parameters) belongs to the model that is trained and to one for"
                in found[name]
            )
            assert "pp_size=1, tp_size=2" in found[name]
        assert "a second model (GPT2LMHeadModel)" in found["second"]
        assert (
            "requires a gradient, which it does not pass back. Leave it out of accelerator.prepare()"
            in found["gradient"]
        )
        assert "GPT2LMHeadModel was prepared for inference and is cut or sharded" in found["trained"]
        assert "2 tensors (first of shape (3, 3)) that are no parameters of LlamaForCausalLM" in found["foreign"]


def freed_main(rank: int, world_size: int) -> list[list[float]]:
    """Two models one after the other, and the first again, as accelerate's memory utilities do it."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **PP2))
    histories = []
    kept: Any = tiny.llama(tied=True)
    for model in (kept, tiny.gpt2(), kept):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
        loader = DataLoader(tiny.rows(16, True), batch_size=8, collate_fn=tiny.collate)
        made, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        histories.append([])
        for inputs in loader:
            loss = made(**inputs).loss
            accelerator.backward(loss)
            histories[-1].append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.free_memory()
    accelerator.hf_parallel.watchdog.stop()
    return histories


def test_another_model_may_be_prepared_after_free_memory(tmp_path: Path) -> None:
    first, second, third = run_ranks(freed_main, 2, tmp_path=tmp_path, env=ENV)[0]
    assert first[0] == pytest.approx(second[0], abs=0.1)
    assert third[0] < first[0] - 0.01, "the first model went on"
