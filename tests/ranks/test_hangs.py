"""A rank that hangs is named in seconds, with what it does and where; one that is slow where nobody measured is let alone."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runner import RankError, is_gone, run_ranks
from trainer_cases import Case, at_step, change_batches, make_trainer


pytestmark = pytest.mark.long

ENV = {"ACCELERATE_USE_CPU": "true"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp_size": 2, "num_microbatches": 4},
    "tp2": {"tp_size": 2},
    "dp2": {},
    "dp2 zero3": {"zero": {"stage": 3}},
}
# Far below the time-out, which a run without measured steps would wait for; the tiny steps take a tenth of it or less.
FLOOR_S, TIMEOUT_S, AT_STEP = 2.5, 45.0, 6
SLOW = pytest.mark.slow


def shorten(batch: dict[str, torch.Tensor]) -> None:
    batch.update({key: value[:, :-1].contiguous() for key, value in batch.items()})


def shift(batch: dict[str, torch.Tensor]) -> None:
    batch["input_ids"] = (batch["input_ids"] + 1) % 97


def unlike_main(rank: int, world_size: int, folder: str, layout: str, kind: str) -> None:
    case = Case("unlike", steps=9, parallel={**LAYOUTS[layout], "monitor": {"hang_timeout_s": TIMEOUT_S}})
    trainer = make_trainer(case, Path(folder), world_size)
    if rank == 1:
        # After the first steps, in which ranks compare their batches before they use them.
        change_batches(trainer, AT_STEP, shorten if kind == "shape" else shift)
    trainer.train()


def until_told(file: Path) -> None:
    """Sleep until the other rank has named this wait: how long that takes depends on the steps before it."""
    end = time.monotonic() + TIMEOUT_S - 10
    while time.monotonic() < end and "longer than steps explain" not in file.read_text():
        time.sleep(0.1)


def hanging_main(
    rank: int, world_size: int, folder: str, layout: str, fault: str, where: str, who: int, step: int = AT_STEP
) -> int:
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    sys.stderr = open(Path(folder) / f"stderr{rank}.txt", "w", buffering=1)  # noqa: SIM115  for the process's life
    monitor = {"hang_timeout_s": TIMEOUT_S, "hang_floor_s": FLOOR_S}
    case = Case("hangs", steps=9, parallel={**LAYOUTS[layout], "monitor": monitor})
    trainer = make_trainer(case, Path(folder), world_size)
    acts = {
        "sleep": lambda: time.sleep(60),
        "nap": lambda: time.sleep(2 * FLOOR_S),
        "doze": lambda: until_told(Path(folder) / "stderr0.txt"),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    }
    if fault in ("nap", "doze"):
        acts[fault] = functools.cache(acts[fault])  # once
    if rank == who:
        at_step(trainer, where, acts[fault], step, AT_STEP)
    trainer.train()
    trainer.accelerator.hf_parallel.watchdog.stop()
    return int(trainer.state.global_step)


def summary(text: str) -> str:
    """What a rank wrote from the first line of the summary on."""
    found = re.search(r"(?s)hf_parallel: rank \d \(\w\w \d of 2\) gave up: .*", text)
    assert found is not None, text
    return found[0]


@pytest.mark.parametrize(
    ("layout", "fault", "where", "says"),
    [
        (
            "pp2",
            "sleep",
            "collator",
            r"is in the data loader since [\d.]+ s \(stack: <lambda> at ranks/test_hangs\.py",
        ),
        pytest.param("dp2", "sleep", "collator", r"is in the data loader since [\d.]+ s \(stack: ", marks=SLOW),
        pytest.param("tp2", "sleep", "collator", r"is in the data loader since [\d.]+ s \(stack: ", marks=SLOW),
        pytest.param(
            *("pp2", "sleep", "forward"),
            r"runs the forward of microbatch 0 at stage \d since [\d.]+ s \(stack: <lambda> at ranks/test_hangs\.py",
            marks=SLOW,
        ),
        (
            "dp2",
            "sleep",
            "backward",
            r"runs the backward pass since [\d.]+ s \(stack: <lambda> at ranks/test_hangs\.py",
        ),
        pytest.param(
            "dp2", "sleep", "forward", r"runs the forward pass since [\d.]+ s \(stack: <lambda> at ", marks=SLOW
        ),
        pytest.param(
            "tp2", "sleep", "forward", r"runs the forward pass since [\d.]+ s \(stack: <lambda> at ", marks=SLOW
        ),
        pytest.param(
            "tp2", "sleep", "backward", r"runs the backward pass since [\d.]+ s \(stack: <lambda> at ", marks=SLOW
        ),
        pytest.param(
            *("dp2 zero3", "sleep", "backward", r"runs the backward pass since [\d.]+ s \(stack: <lambda> at "),
            marks=SLOW,
        ),
        pytest.param(
            "dp2 zero3", "stop", "forward", r"is silent \(stopped\); last seen: runs the forward pass", marks=SLOW
        ),
        pytest.param("dp2", "stop", "collator", r"is silent \(stopped\); last seen: ", marks=SLOW),
        pytest.param("pp2", "stop", "forward", r"is silent \(stopped\); last seen: ", marks=SLOW),
    ],
)
def test_a_hang_names_its_cause_in_seconds_and_alike_on_every_rank(
    layout: str, fault: str, where: str, says: str, tmp_path: Path
) -> None:
    who = 0 if layout == "pp2" else 1
    with pytest.raises(RankError) as caught:
        run_ranks(
            *(hanging_main, 2, str(tmp_path), layout, fault, where, who),
            tmp_path=tmp_path,
            env=ENV,
            timeout=60,
            grace=15,
        )
    other, hung = ((tmp_path / f"stderr{rank}.txt").read_text() for rank in (1 - who, who))
    assert f"rank {1 - who}: exited with code 86" in str(caught.value)
    axis = layout[:2]
    text = summary(other)
    assert where != "collator" or layout == "pp2" or f" (over {axis}), for " in text
    sentence = rf"rank {1 - who} \({axis} {1 - who} of 2\) .*waits .*, held up by rank {who} \({axis} {who} of 2\), which {says}"
    assert re.search(sentence, text), text
    waited = re.search(
        r", for ([\d.]+) s \(([\d.]+) s: 10 times the longest of the last steps, at least monitor", text
    )
    assert waited is not None, text
    assert float(waited[2]) < TIMEOUT_S / 3
    assert float(waited[1]) <= float(waited[2]) + 3
    if fault == "sleep":  # a stopped one was killed before it could say anything
        assert summary(hung).rstrip() == text.rstrip()
    assert all(is_gone(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))


@pytest.mark.parametrize(
    ("layout", "kind", "says"),
    [
        # gloo ends the process that gets a tensor of another size, so only the other one can say anything
        ("pp2", "shape", r"failed in action 0B0(?s:.*)lost rank 1 \(pp 1 of 2\), which has ended"),
        pytest.param("pp2", "rows", r"RankMismatchError: rank 1 \(pp 1 of 2\) read a different batch", marks=SLOW),
        pytest.param("tp2", "shape", r"RankMismatchError: rank 1 \(tp 1 of 2\) read a different batch", marks=SLOW),
        pytest.param("tp2", "rows", r"RankMismatchError: rank 1 \(tp 1 of 2\) read a different batch", marks=SLOW),
    ],
)
def test_a_rank_with_another_batch_is_named(layout: str, kind: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(
            *(unlike_main, 2, str(tmp_path), layout, kind), tmp_path=tmp_path, env=ENV, timeout=TIMEOUT_S / 2, grace=15
        )
    assert re.search(says, str(caught.value)), str(caught.value)


def test_a_callback_that_takes_its_time_is_named_and_not_ended(tmp_path: Path) -> None:
    steps = run_ranks(hanging_main, 2, str(tmp_path), "dp2", "doze", "callback", 1, tmp_path=tmp_path, env=ENV)
    assert steps == [9, 9]
    told = (tmp_path / "stderr0.txt").read_text()
    pattern = (
        r"hf_parallel: a wait of [\d.]+ s, longer than steps explain: rank 0 \(dp 0 of 2\) waits .*, held up by rank 1 \(dp 1 of "
        r"2\), which is in a callback \(on_step_begin\) since .* \(stack: .*never measured, so the run goes on until 45 s"
    )
    assert re.search(pattern, told), told
    assert told.count("longer than steps explain") == 1


def test_a_first_backward_pass_that_takes_its_time_ends_no_run(tmp_path: Path) -> None:
    assert run_ranks(hanging_main, 2, str(tmp_path), "dp2", "nap", "backward", 1, 0, tmp_path=tmp_path, env=ENV) == [
        9,
        9,
    ]


def saving_main(rank: int, world_size: int, folder: str) -> int:
    sys.stderr = open(Path(folder) / f"stderr{rank}.txt", "w", buffering=1)  # noqa: SIM115  for the process's life
    import hf_parallel.checkpoints.weights.write as write

    monitor = {"hang_timeout_s": TIMEOUT_S, "hang_floor_s": 1.0}
    case = Case("saves", steps=AT_STEP, parallel={**LAYOUTS["pp2"], "monitor": monitor})
    trainer = make_trainer(case, Path(folder), world_size)
    trainer.train()
    genuine = write.lay_out

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(4.0)
        return genuine(*args, **kwargs)

    write.lay_out = slow
    trainer.save_model(f"{folder}/model")
    trainer.model.save_pretrained(f"{folder}/again")
    trainer.accelerator.hf_parallel.watchdog.stop()
    return len(list(Path(folder).glob("*/model.safetensors")))


@SLOW
def test_a_disk_that_takes_its_time_ends_no_run(tmp_path: Path) -> None:
    assert run_ranks(saving_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV) == [2, 2]


def loop_main(rank: int, world_size: int, nap_at: int) -> int:
    import tiny
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from hf_parallel import HFParallelPlugin

    monitor = {"hang_timeout_s": TIMEOUT_S, "hang_floor_s": FLOOR_S}
    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, pp_size=2, monitor=monitor))
    model = tiny.llama()
    read = iter(range(1000))

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        if next(read) == nap_at and rank == 0:
            time.sleep(2 * FLOOR_S)
        return tiny.collate(rows)

    loader = DataLoader(tiny.rows(24), batch_size=4, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    steps = 0
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    accelerator.hf_parallel.watchdog.stop()
    return steps


def test_the_first_batch_of_an_epoch_may_take_its_time_in_a_loop_too(tmp_path: Path) -> None:
    assert run_ranks(loop_main, 2, 6, tmp_path=tmp_path, env=ENV) == [12, 12]
    with pytest.raises(RankError, match="exited with code 86"):
        run_ranks(loop_main, 2, 8, tmp_path=tmp_path, env=ENV, grace=15)
