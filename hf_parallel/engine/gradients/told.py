"""What the ranks that share an optimizer tell each other beside the numbers that they add up."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.compat.private_collectives import rows_of_ranks
from hf_parallel.data_parallel.loss_numbers import NUMBERS, TOLERANCE, refuse_unlike_numbers
from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.guards.awaited import Awaited
from hf_parallel.guards.optimizers.settings import OptimizerSettings
from hf_parallel.guards.weights.drift import WeightsOfSteps, refuse_unlike_drops, refuse_unlike_weights
from hf_parallel.guards.weights.trained import TrainedWord, refuse_unlike_trained
from hf_parallel.mesh.groups import Mesh


SPREAD = 4  # numbers, the last ones, of which the other ranks of a model copy hear, too


class ToldOverParts:
    """Their settings, which parameters are trained, and weights that each updates a part of, or what losses over parts have read.

    Args:
        mesh: This rank's mesh.
        parameters: Parameters of this rank.
        settings: Settings of this rank's optimizers.
        replicas: Says which replicas share an optimizer.
    """

    def __init__(
        self, mesh: Mesh, parameters: Iterable[nn.Parameter], settings: OptimizerSettings, replicas: Replicas
    ) -> None:
        self._mesh, self._settings, self._replicas = mesh, settings, replicas
        self._weights: WeightsOfSteps | None = None
        self._parameters = list(parameters)
        self._trained = TrainedWord(self._parameters)
        self._awaited = Awaited(self._judge)
        NUMBERS.take()  # of another model, if its training failed
        # If the optimizer's state is in several copies, each hears of what is wrong in the others.
        self._group = mesh.dp_shard_group if mesh.dp_replicate_group is None else mesh.copies_group

    def updates(self) -> None:
        """An optimizer is about to overwrite what other ranks have of its part."""
        NUMBERS.in_step = True
        weights = self._weights_of_steps()
        if weights is not None:
            weights.update()

    def updated(self) -> None:
        """An optimizer has made its update: what changes weights from now on is code of users."""
        NUMBERS.in_step = False

    def sum(self, power: Tensor, *, infinite: bool) -> tuple[Tensor, Tensor | None]:
        """Sum of the counts of the ranks that share the optimizer (0-d, f64); collective over all copies of its state.

        Returns:
            The sum; a word of each rank's settings and, last (`SPREAD`), a rank that trains other parameters than the first one,
            one that dropped other gradients, one whose weights are not those of the first, and one whose numbers in losses over
            parts and changes of them are not (0: none).
        """
        shard_group, shape = self._mesh.dp_shard_group, self._mesh.shape
        if shard_group is None or self._group is None:
            return power, None
        weights = self._weights_of_steps()
        digests = [*([0, 0] if weights is None else weights.digests()), NUMBERS.take()]
        zero = self._replicas.zero
        drops = self._without_gradient() if zero is None else zero.drops
        words = [self._settings.word(of_stage=True), self._mesh.rank, self._trained.now(), drops, *digests]
        # A number is written on the device: copying it there would wait.
        mine = [word.to(power) if isinstance(word, Tensor) else torch.full_like(power, word) for word in words]
        rows = rows_of_ranks(torch.stack([power, *mine]), self._group)
        powers, settings, ranks, trained, dropped, common, experts, numbers = rows.unbind(1)
        # Copies of the state may be on unlike GPUs, which round differently: these are compared within each.
        common, numbers = common.view(-1, shard_group.size()), numbers.view(-1, shard_group.size())
        experts = experts.view(-1, shape.ep_size, shape.sp_size)  # one replica in `ep_size` has the same ones
        unlike = (common != common[:, :1]).flatten() | (experts != experts[:1, :, :1]).flatten()
        apart = ((numbers - numbers[:, :1]).abs() > TOLERANCE).flatten()
        wrong = [trained != trained[0], dropped != dropped[0], unlike, apart]
        told = torch.cat([settings, torch.stack([ranks * one for one in wrong]).amax(1)])
        first = self._mesh.copy_rank // shard_group.size() * shard_group.size()
        powers = powers[first : first + shard_group.size()]
        return powers.amax() if infinite else powers.sum(), told

    def _without_gradient(self) -> int:
        """A digest of the parameters that have no gradient."""
        return crc32(bytes(parameter.grad is None for parameter in self._parameters))

    def give(self, told: Tensor) -> None:
        """Judge what `sum` returned, at once or when the next comes."""
        self._awaited.give(told)

    def settle(self) -> None:
        """Judge what is not judged yet."""
        self._awaited.settle()

    def compare_weights(self, device: torch.device) -> None:
        """Compare the weights over the ranks, as every norm does in passing; collective over the world.

        Args:
            device: Where the ranks send from.

        Raises:
            RankMismatchError: They differ; on every rank.
        """
        self.settle()
        told = self.sum(torch.zeros((), dtype=torch.float64, device=device), infinite=False)[1]
        if told is not None and dist.group.WORLD is not None:
            dropped, unlike, apart = map(int, rows_of_ranks(told[-3:], dist.group.WORLD).amax(0).tolist())
            refuse_unlike_drops(dropped)
            refuse_unlike_numbers(apart)
            refuse_unlike_weights(unlike)

    def _weights_of_steps(self) -> WeightsOfSteps | None:
        if self._weights is None and self._replicas.zero is not None:
            self._weights = WeightsOfSteps(self._replicas.zero)
        return self._weights

    def _judge(self, numbers: Tensor) -> None:
        *settings, frozen, dropped, unlike, apart = map(int, numbers.tolist())
        if self._group is not None:
            self._settings.refuse_unlike_parts(settings, self._group)
        describe = self._mesh.shape.describe
        refuse_unlike_trained([describe(frozen), "the first replica"] if frozen else [])
        refuse_unlike_drops(dropped)
        refuse_unlike_numbers(apart)
        refuse_unlike_weights(unlike)
