"""A run begins with few lines, on rank 0 alone, without a warning; the tables are there for who asks."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from rank_runner import run_ranks
from transformers import Trainer, TrainingArguments

from hf_parallel import HFParallelCallback


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelno, record.getMessage()))


def begun(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> list[tuple[int, str]]:
    """Level and text of what our loggers say in a step."""
    kept = _Kept()
    logger = logging.getLogger("hf_parallel")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(kept)
    args = TrainingArguments(
        folder, max_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )  # fmt: skip
    callback = HFParallelCallback(settings)
    Trainer(tiny.llama(), args, train_dataset=tiny.rows(16), data_collator=tiny.collate, callbacks=[callback]).train()
    assert callback.session is not None
    callback.session.watchdog.stop()
    return kept.records


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"pp_size": 2, "monitor": {"report": True}},
            [
                r"^hf_parallel \d+\.\d+\.\d+: tp 1 x pp 2 x dp 1 over 2 processes, from the mapping given in code; messages go by gloo$",
                r"^hf_parallel: an optimizer step has 4 rows \(4 a batch x 1 batch x dp 1\); its loss and gradients are those of one",
                r"^hf_parallel: planned and compared with the whole model in \d+\.\d s; details with HF_PARALLEL_LOG=debug, and in hf_parallel_report.html of output_dir after training$",
                r"stage 0 on rank 0 blocks 0 to \d \(\d+% of the compute\), stage 1 on rank 1 blocks \d to \d",
                r"memory of the fullest rank: weights \S+ \+ gradients \S+ \+ Adam \S+ = \S+ GB of \S+ GB, and activations of",
                r"expected: ranks are idle for \d+% of a step of 4 microbatches \(1f1b\); num_microbatches: 8 would leave \d+%",
            ],
        ),
        (
            {"tp_size": 2},
            [
                r"tp 2 x pp 1 x dp 1",
                r"an optimizer step has 4 rows",
                r"planned and compared with the whole model",
                r"tensor parallel: \d+% of the parameters sharded, \d+% whole",
                r"memory of the fullest rank",
            ],
        ),
        (
            {"zero": {"stage": 1}, "gradient_compression": {"method": "bf16"}},
            [
                r"pure data parallelism over 2 processes",
                r"an optimizer step has 8 rows \(4 a batch x 1 batch x dp 2\); .* not those of one process: gradients are sent as bf16",
                r"^hf_parallel: ready in",
                r"zero stage 1: optimizer state in 2 parts; gradient compression bf16",
                r"memory of the fullest rank",
            ],
        ),
    ],
)  # fmt: skip
def test_a_run_begins_with_at_most_six_lines_of_rank_0(
    settings: dict[str, Any], says: list[str], tmp_path: Path
) -> None:
    env = {"ACCELERATE_USE_CPU": "true"}
    first, second = run_ranks(begun, 2, str(tmp_path), settings, tmp_path=tmp_path, env=env, timeout=200)
    assert [text for level, text in second if level >= logging.INFO] == []
    assert [text for level, text in first if level > logging.INFO] == []
    said = [
        text for level, text in first if level == logging.INFO and not text.endswith(" ...")
    ]  # what takes over 2 s
    lines = [text for text in said if "measured:" not in text and "report:" not in text]
    assert len(lines) == len(says) <= 6
    for line, pattern in zip(lines, says, strict=True):
        assert re.search(pattern, line), line
    (terms,) = [line.partition("rank: ")[2].partition(" GB of")[0] for line in lines if "memory of" in line]
    *parts, total = (float(number) for number in re.findall(r"\d\S*", terms))
    assert sum(parts) == pytest.approx(total, rel=0.02), "the terms of a sum add up"
    if "pp_size" in settings:
        assert any("stage  rank" in text for level, text in first if level == logging.DEBUG)
