"""Taking up a checkpoint under any layout: whatever is damaged in it is one error, with the same text on every rank."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_parallel.checkpoints.agree import everyone
from hf_parallel.checkpoints.folders import MANIFEST, check_names, clean, newest, verify
from hf_parallel.checkpoints.state.description import DESCRIPTION, check_trainer_state, read_description
from hf_parallel.checkpoints.state.groups import of_these_groups
from hf_parallel.checkpoints.state.shared import Claim
from hf_parallel.checkpoints.state.small import (
    RANDOM,
    SCHEDULER,
    check_random_states,
    check_scaler,
    load_small,
    rng_file,
)
from hf_parallel.checkpoints.state.training_state import Holdings, load_training_state, rng_source
from hf_parallel.checkpoints.weights.gather import check_config
from hf_parallel.errors import CheckpointError
from hf_parallel.ledger import build_ledger
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.trainer.holdings import holdings_of, load_held_weights, resume_dropout
from hf_parallel.trainer.saving import SavingMixin
from hf_parallel.trainer.state_below import passes_on
from hf_parallel.trainer.user_code import is_users_function


logger = logging.getLogger(__name__)


class ResumeMixin(SavingMixin):
    """Resuming by all ranks; everything falls back to stock for a Trainer that hf_parallel does not drive."""

    def _holdings(self) -> Holdings:
        """The parts of the run that this rank holds; the model is parallelized if it was not yet."""
        session = self.hf_parallel_session
        if session is None:
            return self._held_alone()
        return holdings_of(self.accelerator.attach_model(self.model), session.config)

    def _held_alone(self) -> Holdings:
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        ledger = build_ledger(model, pp_size=1, holds=lambda stage, name: True, specs={})
        named = dict(model.named_parameters(remove_duplicate=False))
        parameters = {entry.name: named[entry.name] for entry in ledger if entry.kind == "param"}
        others = dict(model.named_buffers(remove_duplicate=False))
        buffers = {entry.name: others[entry.name] for entry in ledger if entry.kind == "buffer"}
        return Holdings(ledger, self._hf_parallel_mesh, parameters, buffers)

    @property
    def _run_dirs(self) -> list[Path]:
        """Folders that may have checkpoints of this run."""
        return [Path(self.args.output_dir or ".")]

    def _newest_checkpoint(self) -> str:
        """Path of the newest complete checkpoint, the same on every rank; what killed saves left is removed.

        Raises:
            CheckpointError: There is none.
        """
        run_dirs, found = self._run_dirs, [""]
        with self._together(run_dirs[0], "find a checkpoint", writes=False):
            if self._hf_parallel_mesh.rank == 0:
                found = [_find_newest(run_dirs)]
        if dist.is_initialized():
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if not self._reads(folder):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        holdings = self._holdings()
        mesh = holdings.mesh
        with self._together(folder, "check the checkpoint", writes=False):
            self._require_seen(folder)
            verify(folder, mesh.rank, mesh.shape.world_size)
            check_config(folder, self.model.config)
            check_trainer_state(folder)
        self._load_held(folder, holdings)
        given = (resume_from_checkpoint,) if model is None else (resume_from_checkpoint, model)
        self._load_more(super()._load_from_checkpoint, holdings, *given)

    def _require_seen(self, folder: Path) -> None:
        """Refuse a folder that only some ranks see; collective."""
        seen = everyone(folder.is_dir())
        if any(seen) and not all(seen):
            blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
            raise CheckpointError(
                f"{folder} does not exist for ranks {blind}, and does for the others. Is this folder shared? Every rank reads "
                "its part of a checkpoint: put it on a file system that all machines mount."
            )

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint))
        if not self._reads(folder):
            super()._load_best_model()
            return
        with self._together(folder, "look at the best checkpoint", writes=False):
            check_names(folder)
        holdings = self._holdings()
        self._load_held(folder, holdings)
        self._load_more(super()._load_best_model, holdings)

    def _load_more(self, method: Callable[..., None], holdings: Holdings, *args: Any) -> None:
        """Run a user's method that loads weights, after ours: what it calls of stock reads the same ones again."""
        if is_users_function(method):
            method(*args)
            if holdings.replicas is not None:
                holdings.replicas.reloaded()

    def _reads(self, folder: Path) -> bool:
        """Whether weights are read here: one process leaves what the stock Trainer wrote to stock code."""
        return self._hf_parallel_checkpoints and not (self._hf_parallel_alone and not (folder / MANIFEST).is_file())

    def _load_held(self, folder: Path, holdings: Holdings) -> None:
        """Read this rank's parameters and buffers."""
        model = self.accelerator.unwrap_model(self.model)
        with self._together(folder, "read the weights", writes=False):
            load_held_weights(folder, model, holdings)
        if holdings.replicas is not None:
            holdings.replicas.reloaded()

    def _takes_up(self, checkpoint: str | None) -> bool:
        """Whether the training state is read here; several ranks miss it if it is not there."""
        if checkpoint is None or not self._hf_parallel_checkpoints:
            return False
        return not self._hf_parallel_alone or Path(checkpoint, DESCRIPTION).is_file()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        theirs = super()._load_optimizer_and_scheduler
        if is_users_function(theirs) and not passes_on(theirs):  # it reads more, of a state that it takes for loaded
            self._hf_parallel_load_state(checkpoint, lambda checkpoint: None)
        theirs(checkpoint)

    def _hf_parallel_load_state(self, checkpoint: str | None, stock: Callable[[str | None], None]) -> None:
        """Read this rank's part of the training state."""
        if checkpoint is None or not self._takes_up(checkpoint):
            stock(checkpoint)
            return
        folder, holdings = Path(checkpoint), self._holdings()
        with self._together(folder, "read the training state", writes=False):
            resumed = load_training_state(folder, holdings, self._bare_optimizer())
            self._load_scheduler(folder / SCHEDULER, resumed.order)
        resume_dropout(self._engine, resumed.dropout_step)

    def _load_scheduler(self, path: Path, order: list[int]) -> None:
        if self.lr_scheduler is None:
            return
        state = load_small(path)
        last = state.get("last_epoch", 0)
        if type(last) is not int or last < 0:
            raise CheckpointError(
                f"{path} says last_epoch={last!r:.60}: it is damaged. Resume from another checkpoint."
            )
        try:
            self.lr_scheduler.load_state_dict(of_these_groups(state, order, self.lr_scheduler.state_dict()))
        except Exception as error:  # another scheduler's state raises nearly anything
            raise CheckpointError(
                f"{path} is not the state of a {type(self.lr_scheduler).__name__} ({error!r:.100}). Resume with the "
                "lr_scheduler_type it was saved with."
            ) from error

    def _hf_parallel_load_scaler(self, checkpoint: str | None, stock: Callable[[str | None], None]) -> None:
        """Load the loss scale; refuse a state that is damaged, missing, or of a run in another precision."""
        if checkpoint is None or not self._takes_up(checkpoint):
            stock(checkpoint)
            return
        folder, scaler = Path(checkpoint), getattr(self.accelerator, "scaler", None)
        scales = scaler is not None and scaler.is_enabled()
        with self._together(folder, "read the loss scale", writes=False):
            state = check_scaler(folder, read_description(folder).get("scaler"), scales)
            if state is not None and scaler is not None:
                scaler.load_state_dict(state)
        if state is None and scaler is not None and scales and self._hf_parallel_mesh.rank == 0:
            logger.warning(
                "hf_parallel: %s is of a run without a loss scaler: the loss scale begins at %g.",
                folder,
                scaler.get_scale(),
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load this rank's random states; under another layout, all ranks of a copy take those of one saved copy."""
        if checkpoint is None or not self._hf_parallel_checkpoints or not Path(checkpoint, DESCRIPTION).is_file():
            super()._load_rng_state(checkpoint)
            return
        folder = Path(checkpoint)
        with self._together(folder, "take up the random states", writes=False):
            saved = MeshShape(**read_description(folder)["mesh"])
            check_random_states(folder, saved.world_size)
            source = folder / rng_file(rng_source(saved, self._hf_parallel_mesh), saved.world_size)
            load_small(source, RANDOM)
            try:
                self._load_rng_file(source)
            except Exception as error:  # whatever the generators say to a damaged state
                raise CheckpointError(
                    f"{source} cannot be taken up: {error!r:.160}. It is damaged; resume from another checkpoint."
                ) from error

    def _load_rng_file(self, source: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # Stock code, and that of users, looks for a file with this rank's number; users may have put others beside it.
            mine = rng_file(self.args.process_index, self.args.world_size)
            for each in source.parent.iterdir():
                if each.name != mine:
                    Path(folder, each.name).symlink_to(each.resolve())
            Path(folder, mine).symlink_to(source.resolve())
            super()._load_rng_state(folder)


def _find_newest(run_dirs: Sequence[Path]) -> str:
    found = []
    for run_dir in run_dirs:
        _clean(run_dir)
        path, passed = newest(run_dir)
        for reason in passed:
            logger.warning("hf_parallel: passed over an incomplete checkpoint: %s.", reason)
        if path is not None:
            found.append(path)
    if not found:
        raise CheckpointError(f"{run_dirs[0]} has no complete checkpoint to resume from. Start without resuming.")
    return str(max(found, key=step_of))


def step_of(folder: Path) -> int:
    """Number of steps in the name of a checkpoint."""
    return int(folder.name.rpartition("-")[2])


def _clean(run_dir: Path) -> None:
    claim = Claim(run_dir)
    try:
        if run_dir.is_dir():
            claim.take()
            clean(run_dir)
    except CheckpointError as busy:
        logger.warning("hf_parallel: what killed saves left is not removed: %s", busy)
    finally:
        claim.release()
