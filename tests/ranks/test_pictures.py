"""Models that read pictures beside text train on stages, shards and ZeRO 3 as in one process, in a stock Trainer.

Stages need a sample with pictures. Where a row may have several pictures, or where pictures are lists of patches, they have
no dim of rows: such batches run whole. Positions in time, height and width have their rows in the second dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rank_runner import run_ranks
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import ENV
from transformers import Trainer, TrainingArguments
from zoo.models import quiet


LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one": (1, None),
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 2}),
    "zero3": (2, {"zero": {"stage": 3}}),
    "pp2_tp2": (4, {"pp_size": 2, "num_microbatches": 2, "tp_size": 2}),
}
PICTURE, LENGTH, BATCH = 255, 14, 8
TEXT = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 256},
}
SIGHT = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
Row = dict[str, Tensor]


def gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=SIGHT, mm_tokens_per_image=4, image_token_index=PICTURE
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def llava() -> Any:
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**SIGHT, "model_type": "clip_vision_model"},
        image_token_index=PICTURE,
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl() -> Any:
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
        image_token_id=PICTURE,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    """Its first blocks add what early blocks of the vision tower saw."""
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        vision_config={
            **{"depth": 3, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
            **{"patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [1, 2]},
        },
        image_token_id=PICTURE,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def lively(model: Any) -> Any:
    """With random numbers in place of zeros, which a relative tolerance says nothing about."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return model


def row_of(index: int, pictures: int) -> Row:
    """A row of text with some pictures of four tokens each."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(5, 250, (LENGTH,), generator=generator)
    ids[2 : 2 + 4 * pictures] = PICTURE
    labels = ids.masked_fill(ids == PICTURE, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def with_pictures(index: int, pictures: int) -> Row:
    generator = torch.Generator().manual_seed(1000 + index)
    return {**row_of(index, pictures), "pixel_values": torch.randn(pictures, 3, 28, 28, generator=generator)}


def for_gemma3(index: int) -> Row:
    row = with_pictures(index, 1)
    return {**row, "token_type_ids": (row["input_ids"] == PICTURE).long()}


def for_qwen(index: int) -> Row:
    row, generator = row_of(index, 1), torch.Generator().manual_seed(1000 + index)
    patches = {"pixel_values": torch.randn(16, 1176, generator=generator), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return {**row, **patches, "mm_token_type_ids": (row["input_ids"] == PICTURE).long()}


def for_qwen_text(index: int) -> Row:
    positions = torch.arange(LENGTH).repeat(3, 1) + torch.arange(3)[:, None] * (index % 3)
    return {**row_of(index, 0), "position_ids": positions[:, None]}


JOINED = {"pixel_values": 0, "image_grid_thw": 0, "position_ids": 1}


def collate(rows: list[Row]) -> Row:
    return {
        name: torch.cat([row[name] for row in rows], JOINED[name])
        if name in JOINED
        else torch.stack([row[name] for row in rows])
        for name in rows[0]
    }


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Row]]] = {
    "one_a_row": (gemma3, for_gemma3),
    "several_a_row": (llava, lambda index: with_pictures(index, 1 + index % 2)),
    "patches": (qwen2_vl, for_qwen),
    "early_sight": (qwen3_vl, for_qwen),
    "three_positions": (qwen2_vl, for_qwen_text),
}


def trains(rank: int, world_size: int, layout: str, folder: str) -> list[float]:
    from hf_parallel import HFParallelCallback

    losses, parallel = [], LAYOUTS[layout][1]
    for name, (model, row) in CASES.items():
        torch.manual_seed(0)
        data = [row(index) for index in range(3 * BATCH)]
        arguments = TrainingArguments(
            f"{folder}/{name}",
            per_device_train_batch_size=BATCH // (world_size if layout.startswith("zero") else 1),
            max_steps=3,
            logging_steps=1,
            optim="sgd",
            learning_rate=0.1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        callbacks = [] if parallel is None else [HFParallelCallback({}, sample=collate(data[:2]), **parallel)]
        with quiet():
            trainer = Trainer(lively(model()), arguments, collate, data, callbacks=callbacks)
        trainer.train()
        trainer.save_model(f"{folder}/{name}")
        losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if parallel is not None:
            trainer.hf_parallel_session.watchdog.stop()
    return losses


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[float], Path]]:
    @functools.cache
    def run(layout: str) -> tuple[list[float], Path]:
        world, folder = LAYOUTS[layout][0], tmp_path_factory.mktemp(layout)
        options: dict[str, Any] = {"tmp_path": folder, "timeout": 240, "init_group": world > 1, "env": ENV}
        return run_ranks(trains, world, layout, str(folder), **options)[0], folder

    return run


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
def test_models_that_read_pictures_train_as_in_one_process(
    layout: str, run_of: Callable[[str], tuple[list[float], Path]]
) -> None:
    (losses, here), (expected, there) = run_of(layout), run_of("one")
    assert len(expected) == 3 * len(CASES)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name in CASES:
        weights = [load_file(folder / name / "model.safetensors") for folder in (here, there)]
        assert weights[0].keys() == weights[1].keys()
        for key, value in weights[1].items():
            assert (weights[0][key] - value).norm() <= 1e-5 * value.norm(), (name, key)
