"""Records one process for a comparison: logged numbers, and its parts of every gradient and parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Trainer, TrainerCallback

from hf_parallel.checkpoints.state.optimizer import start_in
from hf_parallel.checkpoints.state.pieces import pieces_of
from hf_parallel.checkpoints.state.training_state import Holdings
from hf_parallel.compat.private_torch import no_torch_function_modes
from hf_parallel.data_parallel.flat import FlatShard
from hf_parallel.data_parallel.fsdp_parts import first_row_of, local_of
from hf_parallel.guards.gradients.shown import plain_of
from hf_parallel.proof.optimizer_settings import file_of, settings_of
from hf_parallel.trainer.holdings import holdings_of


RUN = "run.json"
GRADIENTS, PARAMETERS, BEFORE = (
    "gradients",
    "parameters",
    "before",
)  # files; before: parameters when the traced step begins
LOGGED = ("loss", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class Run:
    """A run of consecutive elements of a parameter, or of its gradient.

    Args:
        name: Name of the parameter.
        start: Position of the first element in this rank's tensor-parallel shard.
        elements: f[n]; None: there is no gradient.
    """

    name: str
    start: int
    elements: Tensor | None


class Recorder(TrainerCallback):
    """Writes the gradients that each optimizer step uses and the parameters after the last one.

    Args:
        folder: Folder to write to.
        steps: Number of optimizer steps.

    Attributes:
        trainer: The Trainer that it belongs to.
        trained: Optimizer steps so far.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.trained = 0
        self.trainer: Trainer | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The rate is that of the step."""
        holdings, optimizer = self._holdings(), self._optimizer
        if holdings is None:
            names = {id(parameter): name for name, parameter in self._named()}
            inside = [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
        else:
            inside = holdings.view(optimizer).group_names
        found = settings_of(optimizer.param_groups, inside)
        (self.folder / file_of(state.global_step)).write_text(json.dumps(found))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The gradients are reduced and clipped."""
        self.trained += 1
        holdings = self._holdings()
        if holdings is None:
            self._write_whole(f"{GRADIENTS}-{state.global_step}", {n: p.grad for n, p in self._named()})
        else:
            runs = gradients_of(holdings, self._optimizer)
            self._write_pieces(f"{GRADIENTS}-{state.global_step}", holdings, runs)

    def write_parameters(self, what: str) -> None:
        """Write the parameters as they are now."""
        holdings = self._holdings()
        if holdings is None:
            self._write_whole(what, dict(self._named()))
            return
        if holdings.replicas is not None:
            holdings.replicas.synchronise()  # parameters may still be arriving
        self._write_pieces(what, holdings, parameters_of(holdings))

    def finish(self) -> None:
        """Write the parameters, and the numbers that were logged."""
        self.write_parameters(PARAMETERS)
        history = self.trainer.state.log_history  # type: ignore[union-attr]
        logged = [{key: entry[key] for key in LOGGED if key in entry} for entry in history if "loss" in entry]
        args, model = self.trainer.args, self.trainer.model  # type: ignore[union-attr]
        about = {"rows": args.per_device_train_batch_size, "accumulation": args.gradient_accumulation_steps}
        kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
        run = {"logged": logged, "model_type": kind, **about, **self.place()}
        (self.folder / RUN).write_text(json.dumps(run))

    def place(self) -> dict[str, Any]:
        """Position of this process in the layout."""
        holdings = self._holdings()
        if holdings is None:
            return {"rank": 0, "dp": 0, "pp": 0, "tp": 0, "sp": 0, "sharded": [], "shared": []}
        mesh = holdings.mesh
        sharded = [entry.name for entry in holdings.ledger if entry.spec is not None]
        shared = [entry.name for entry in holdings.ledger if len(entry.holders) > 1]
        axes = {"rank": mesh.rank, "dp": mesh.dp_rank, "pp": mesh.pp_rank, "tp": mesh.tp_rank, "sp": mesh.sp_rank}
        return {**axes, "sharded": sharded, "shared": shared}

    @property
    def _optimizer(self) -> Any:
        """The one inside of accelerate's."""
        optimizer: Any = self.trainer.optimizer  # type: ignore[union-attr]
        return getattr(optimizer, "optimizer", optimizer)

    def _holdings(self) -> Holdings | None:
        accelerator: Any = self.trainer.accelerator  # type: ignore[union-attr]
        session = getattr(accelerator, "hf_parallel", None)
        return None if session is None else holdings_of(accelerator.hf_parallel_engine, session.config)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        model: Any = self.trainer.model  # type: ignore[union-attr]
        return ((name, p) for name, p in model.named_parameters() if p.requires_grad)

    def _write_whole(self, what: str, tensors: Mapping[str, Tensor | None]) -> None:
        held = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items() if tensor is not None}
        pieces = {name: [name, [0] * tensor.ndim] for name, tensor in held.items()}
        self._write(what, held, pieces, [name for name, tensor in tensors.items() if tensor is None])

    def _write_pieces(self, what: str, holdings: Holdings, runs: Iterator[Run]) -> None:
        held: dict[str, Tensor] = {}
        pieces: dict[str, list[Any]] = {}
        absent: list[str] = []
        with no_torch_function_modes(), torch.no_grad():  # what this rank has, not what user code is shown
            for run in runs:
                if run.elements is None:
                    absent.append(run.name)
                    continue
                entry = holdings.ledger.entries[run.name]
                for piece in pieces_of(run.name, entry, holdings.mesh, run.elements, run.start):
                    key = str(len(held))
                    held[key], pieces[key] = piece.data.detach().to("cpu").clone(), [run.name, list(piece.offsets)]
        self._write(what, held, pieces, absent)

    def _write(self, what: str, held: dict[str, Tensor], pieces: dict[str, list[Any]], absent: list[str]) -> None:
        save_file(held, self.folder / f"{what}.safetensors")
        (self.folder / f"{what}.json").write_text(json.dumps({"pieces": pieces, "absent": absent}))


def gradients_of(holdings: Holdings, optimizer: torch.optim.Optimizer) -> Iterator[Run]:
    """The gradients that the optimizer of this rank is about to use."""
    view = holdings.view(optimizer)
    if view.zero is not None:
        for shard in view.zero.shards:
            yield from _of_flat(shard)
        return
    for name, parameter in view.trained():
        gradient = None if parameter.grad is None else local_of(plain_of(parameter.grad)).detach()
        start = first_row_of(parameter) * parameter.shape[1:].numel()
        yield Run(name, start, None if gradient is None else gradient.contiguous().view(-1))


def _of_flat(shard: FlatShard) -> Iterator[Run]:
    gradient = shard.master.grad
    for position, name in enumerate(shard.bucket.names):
        piece = shard.inside(position)
        if piece is None:
            continue  # other ranks have it
        absent = gradient is None or any(s.start <= piece.start and piece.stop <= s.stop for s in shard.absent)
        elements = None if absent or gradient is None else plain_of(gradient).detach().view(-1)[piece]
        yield Run(name, start_in(shard, position, piece), elements)


def parameters_of(holdings: Holdings) -> Iterator[Run]:
    """The trained parameters of this rank."""
    for name, parameter in holdings.parameters.items():
        if not parameter.requires_grad:
            continue
        start = first_row_of(parameter) * parameter.shape[1:].numel()
        yield Run(name, start, local_of(parameter).detach().contiguous().view(-1))
