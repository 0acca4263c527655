"""A model of a chosen size in a stock Trainer, with and without the callback, and a clock around its steps."""

from __future__ import annotations

import dataclasses
import gc
import time
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from gpu_proof_parts.ranks import Setting
from hf_parallel import HFParallelCallback


@dataclasses.dataclass(frozen=True)
class Size:
    """A Llama and its batch of `rows` sequences of `length` tokens on each replica."""

    name: str
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    rows: int
    length: int

    def config(self, attention: str = "sdpa") -> LlamaConfig:
        """Of the model."""
        return LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            max_position_embeddings=self.length,
            attn_implementation=attention,
            use_cache=False,
        )


TINY = Size("tiny", 64, 4, 4, 2, 176, 512, 4, 32)
SMALL = Size("0.2B", 1024, 12, 16, 16, 2816, 32000, 4, 1024)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, the same ones for every run."""

    def __init__(self, size: Size, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(0, size.vocab, (count, size.length), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class Clock(TrainerCallback):
    """Seconds of every optimizer step, from the end of the device's work to its next end."""

    def __init__(self, skipped: int) -> None:
        self.skipped, self._all = skipped, list[float]()
        self._start = 0.0

    @property
    def seconds(self) -> list[float]:
        """Of the steps after the first."""
        return self._all[self.skipped :]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        if torch.cuda.is_available() and state.global_step == 1:
            torch.cuda.reset_peak_memory_stats()  # what making and cutting the model took is over
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        self._all.append(time.perf_counter() - self._start)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run.

    Args:
        parallel: Settings of the callback; None for a stock Trainer.
        steps: That are timed.
        skipped: That are not, before them.
        half: Whether parameters are in bf16, else in fp32 under autocast.
        attention: Implementation.
        arguments: More of the Trainer's.
    """

    parallel: dict[str, Any] | None
    steps: int = 8
    skipped: int = 3
    half: bool = False
    attention: str = "sdpa"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a run found; `peak_bytes` are those that tensors had at once, from the second step on."""

    seconds: list[float]
    losses: list[float]
    peak_bytes: int
    parameters: int


def train(setting: Setting, size: Size, run: Run, replicas: int = 1) -> Found:
    """Train in this process, which may be a rank; leaves nothing behind."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(0)
    with torch.device(setting.kind):
        model = LlamaForCausalLM(size.config(run.attention)).to(torch.bfloat16 if run.half else torch.float32)
    parameters, clock = sum(p.numel() for p in model.parameters()), Clock(run.skipped)
    total = run.steps + run.skipped
    arguments = TrainingArguments(
        str(setting.folder / "trainer"),
        per_device_train_batch_size=size.rows,
        max_steps=total,
        bf16=not run.half,
        logging_steps=total,
        use_cpu=setting.device == "cpu",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        learning_rate=1e-5,
        dataloader_pin_memory=setting.device == "cuda",
        **run.arguments,
    )
    callbacks: list[TrainerCallback] = [clock]
    if run.parallel is not None:
        callbacks.append(HFParallelCallback({}, **run.parallel))
    data = Tokens(size, size.rows * replicas * total)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    peak = torch.cuda.max_memory_allocated() if setting.kind == "cuda" else 0
    del trainer, model, session
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    return Found(clock.seconds, losses, peak, parameters)
