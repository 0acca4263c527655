"""Agreement of all ranks on what a Trainer does next: log, evaluate, save, stop."""

from __future__ import annotations

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_parallel.engine.session import Session


def logs_next(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the Trainer logs after the step that is under way, as its arguments say."""
    step = state.global_step + 1
    in_steps = args.logging_strategy == IntervalStrategy.STEPS and step % max(1, state.logging_steps) == 0
    return in_steps or (step == 1 and args.logging_first_step)


def agree_on_flags(session: Session, control: TrainerControl, state: TrainerState, *names: str) -> None:
    """Meet the other ranks if a callback, or the Trainer's schedule, has set one of these; collective.

    Args:
        session: The run.
        control: Flags of the Trainer.
        state: Progress of the Trainer.
        names: Flags of `control`.

    Raises:
        RankMismatchError: Only some ranks are told so.
    """
    step = state.global_step
    logs_anyway = step == 1 or step % max(1, state.logging_steps) == 0  # which every rank knows
    known = ("should_log",) if logs_anyway else ()
    found = ", ".join(name for name in names if getattr(control, name) and name not in known)
    if found:
        with session.watchdog.waiting(
            f"waits for the other ranks, because {found} of TrainerControl is set after step {step}"
        ):
            session.flags.agree(found, step)
