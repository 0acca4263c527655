"""Code of users inside a Trainer that all ranks run alike: numbers it takes of weights are those of whole ones, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from hf_parallel.compat.private_peft import tuner_layers
from hf_parallel.data_parallel.fsdp import explained
from hf_parallel.data_parallel.fsdp_parts import is_part
from hf_parallel.engine.run.engine import Engine
from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.guards.calls.on_stages import OnStages
from hf_parallel.guards.meeting import meeting_of_shards
from hf_parallel.guards.optimizers.states import PartStates
from hf_parallel.guards.weights.state_dicts import ShardOfState
from hf_parallel.tensor_parallel.run.known_parts import known_parts
from hf_parallel.tensor_parallel.run.parts import watch_calls
from hf_parallel.trainer.prepared import bare_optimizer
from hf_parallel.trainer.state_below import passes_on


# What subclasses override and that runs on all ranks. In `compute_loss` a model of shards itself lists whole parameters.
METHODS = ("training_step", "prediction_step", "evaluation_loop", "evaluate", "predict", "log", "save_model")
KINDS: tuple[type[Tensor], ...] = (ShardOfState,)
LIBRARIES = ("transformers", "hf_parallel")


class UserCode:
    """Watches what a Trainer calls of users, for one model.

    Args:
        trainer: The Trainer; changed in place.
        model: Its model, cut and sharded.
        engine: The model's engine.
    """

    def __init__(self, trainer: Trainer, model: nn.Module, engine: Engine) -> None:
        self.model = model
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        stages: OnStages | None = None
        meeting = meeting_of_shards(engine.mesh)
        options: dict[str, Any] = {"kinds": KINDS, "meet": lambda: meeting.meet("a number of sharded weights")}
        if isinstance(engine, PipelineEngine):
            stages = OnStages(
                *(engine.attachment.parameters, engine.mesh.shape.pp_size),
                resting=lambda: engine.is_running,
                everywhere=engine.attachment.ledger.on_all(engine.mesh.shape.pp_size),
                states=functools.partial(_states_of, trainer),
                layers=tuner_layers(model),
            )
            engine.watching, options["gathered"] = stages.modes, stages.follow
        known = known_parts(model, **options)
        self._known, self._makes_optimizer = known, overrides(trainer, "create_optimizer")
        in_parts = any(map(is_part, model.parameters()))
        if known is not None:
            engine.attachment.gradients.states.is_known = lambda tensor: known.of(tensor) is not None
        if stages is None and known is None and not in_parts:
            return

        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            told = explained(call) if in_parts else call
            return watch_calls(told if stages is None else stages.watch(told), known)

        handler = trainer.callback_handler  # for callbacks that are added later, too
        call_event = handler.call_event
        if isinstance(engine, PipelineEngine):
            call_event = _inside(engine.in_callback, call_event)
        self._replace(handler, "call_event", watched(call_event))
        for name in METHODS:
            if overrides(trainer, name):
                self._replace(trainer, name, watched(getattr(trainer, name)))
        if stages is not None and overrides(trainer, "compute_loss"):
            self._replace(trainer, "compute_loss", stages.watch(trainer.compute_loss))
        if trainer.compute_metrics is not None:
            self._replace(trainer, "compute_metrics", watched(trainer.compute_metrics))

    def making_optimizer(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """`create_optimizer`; one of users finds the sizes of whole parameters (rates by width, groups by count)."""
        return watch_calls(create, self._known) if self._makes_optimizer else create

    def _replace(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        self._replaced.append((owner, name, vars(owner).get(name), by))
        vars(owner)[name] = by

    def stop(self) -> None:
        """Put back what was there before, unless somebody has put something else there."""
        for owner, name, own, ours in self._replaced:
            if vars(owner).get(name) is ours:
                del vars(owner)[name]
                if own is not None:
                    vars(owner)[name] = own


def _states_of(trainer: Trainer) -> Mapping[Any, Any]:
    """State of the optimizer, by parameter; nothing of an optimizer of flat parts, which has its own rules."""
    state: Any = bare_optimizer(trainer.optimizer).state if trainer.optimizer is not None else {}
    return {} if isinstance(state, PartStates) else state


def _inside(context: Callable[[], AbstractContextManager[None]], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        with context():
            return call(*args, **kwargs)

    return called


def is_users(callback: Any) -> bool:
    """Whether a callback is neither of transformers nor ours."""
    return _is_users(type(callback))


def answers(callback: TrainerCallback, event: str) -> bool:
    """Whether a callback does something at an event, by a method of its class or one that was put on the object."""
    method = getattr(callback, event)
    return getattr(method, "__func__", method) is not getattr(TrainerCallback, event)


def overrides(trainer: object, name: str) -> bool:
    """Whether a method was put on the object or is one of a subclass; ours may be put over that."""
    return name in vars(trainer) or any(name in vars(kind) and _is_users(kind) for kind in type(trainer).__mro__)


def own_states(trainer: object) -> list[str]:
    """Methods of a Trainer's subclass, put on the object or on Trainer that would save or load training state without ours."""
    return [name for name in ("_save_optimizer_and_scheduler", "_load_scaler") if not _reaches_ours(trainer, name)]


def _reaches_ours(trainer: object, name: str) -> bool:
    """Whether nobody replaces a method below which ours stands, or only by methods that call it."""
    methods = [vars(kind)[name] for kind in type(trainer).__mro__ if name in vars(kind) and _is_users(kind)]
    return name not in vars(trainer) and not is_users_function(getattr(Trainer, name)) and all(map(passes_on, methods))


def is_users_function(function: Callable[..., Any]) -> bool:
    """Whether a function, or the one that a method is, was defined neither by transformers, nor accelerate, nor us."""
    return function.__module__.partition(".")[0] not in (*LIBRARIES, "accelerate")


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in LIBRARIES
