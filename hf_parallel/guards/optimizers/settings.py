"""Learning rates, weight decay and the like must be the same on all ranks of a model copy, and on those that share an optimizer.

`if state.is_world_process_zero: group["lr"] *= 0.1` changes them for one stage, shard or part only. A digest of them rides on
messages that are sent anyway: that in which the ranks compare what they backpropagated, what the stages tell each other before an
optimizer steps, and the norm over the parts of ZeRO. Replicas that each update all weights send one with their first gradients. Only where
digests differ do the ranks tell each other more.

Whether an optimizer has lost its state since its last step (`optimizer.state.clear()`) counts as a setting, which one that never had any
does not have. Ranks with the same modules tell each other their dropout rates by the same digest.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.rates import RatesOfModules
from hf_parallel.mesh.groups import Mesh


BITS = 48  # exact as a float64
ROUNDING = 1e-3  # relative
PLAIN = (int, float, str, tuple, list, type(None))  # a tensor on a GPU is not waited for

UNTOLD = ("params", "fused", "foreach")  # the last two choose kernels, and ours does so while a step runs
STATE, KEPT, GONE = "state", "kept", "gone"

Settings: TypeAlias = list[dict[str, str]]  # of the groups of one optimizer after the other


class Told(NamedTuple):
    """Facts that ranks tell each other where their words differ.

    Attributes:
        used: Settings used last.
        now: Settings of now.
        kinds: Kinds of the parameters of each group.
        rates: Rates of modules.
        hooked: Names of parameters with hooks that need whole gradients.
    """

    used: Settings
    now: Settings
    kinds: list[list[str]]
    rates: dict[str, str]
    hooked: list[str]


class _Spelled(NamedTuple):
    """Settings, and a digest of them."""

    settings: Settings
    digest: bytes


NONE = _Spelled([], b"")
Known: TypeAlias = tuple[_Spelled, _Spelled]  # used last, and now


class OptimizerSettings:
    """Knows the settings of this rank's optimizers, so that ranks can compare them.

    Args:
        mesh: This rank's mesh.
        parameters: Name -> this rank's parameter.

    Attributes:
        rates: Rates of this rank's modules; None as long as no model is known.
        hooked: Names of the parameters with hooks for which the ranks of a stage gather gradients, as this pass begins.
    """

    def __init__(self, mesh: Mesh, parameters: Mapping[str, nn.Parameter]) -> None:
        self._mesh = mesh
        self.rates: RatesOfModules | None = None
        self.hooked: list[str] = []
        self._kinds = {id(parameter): re.sub(r"\d+", "#", name) for name, parameter in parameters.items()}
        self._optimizers: list[Optimizer] = []
        self._states: list[str] = []  # of each: kept, gone, or "" before there was any
        self._objects: list[Any] = []  # in the groups when `_now` was called last
        self._values: list[tuple[str, Any]] = []  # that `_last` spells
        self._mutable = False  # whether one of them may be changed in place
        self._last = NONE
        self._used = NONE  # in the last step, where callbacks may change them for this one step
        self._stages_differ = False  # by what user code has made: groups of single blocks, say

    def add(self, optimizer: Optimizer) -> None:
        """Count the groups of another optimizer too."""
        if not any(one is optimizer for one in self._optimizers):
            self._optimizers.append(optimizer)
            self._states.append("")

    def use(self) -> None:
        """Remember the settings that a step uses."""
        self.look_at_states()
        self._used = self._now()

    def look_at_states(self) -> None:
        """See which optimizers have a state, before a step and after it."""
        for index, optimizer in enumerate(self._optimizers):
            has_any = any(not isinstance(state, Mapping) or len(state) for state in optimizer.state.values())
            self._states[index] = KEPT if has_any else GONE if self._states[index] else ""

    def known(self) -> Known:
        """The settings of the last step, and those of now."""
        return self._used, self._now()

    def word(self, known: Known | None = None, *, of_stage: bool = False) -> int:
        """A digest of what was used last and of what is set now, or of what `known` gave.

        Args:
            known: Facts that are told in place of those known now.
            of_stage: Whether replicas of one stage alone compare it: other stages have other modules, and each copy may have hooks.
        """
        used, now = known or self.known()
        text = used.digest + now.digest
        if self.rates is not None and (of_stage or self._mesh.shape.pp_size == 1):
            text += self.rates.digest
        if self.hooked and not of_stage and self._mesh.shape.pp_size == 1:  # stages ask each other in every schedule
            text += repr(self.hooked).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") & ((1 << BITS) - 1)

    def refuse_unlike(self, words: Sequence[int], known: Known | None = None) -> None:
        """Compare the settings; collective over the model copy if they differ.

        Args:
            words: Words of the ranks of this model copy.
            known: Facts that this rank's word was made of, if they differ from those known now.

        Raises:
            RankMismatchError: Raised on every rank, with a setting that differs.
        """
        everyone = self._compare(words, self._mesh.copy_ranks, self._mesh.mp_group, self._mesh.shape.stage_size, known)
        ranks = self._mesh.copy_ranks
        for name in sorted({name for told in everyone for name in told.hooked}):
            with_hook = [rank for rank, told in zip(ranks, everyone, strict=True) if name in told.hooked]
            without = [rank for rank in ranks if rank not in with_hook]
            if without:
                self._raise_hooks(name, with_hook[0], without[0])

    def refuse_unlike_stages(self, words: Sequence[int]) -> None:
        """Compare the settings before an optimizer steps; collective over the stages if they differ.

        Args:
            words: Words of the ranks of this rank's pipeline.

        Raises:
            RankMismatchError: Raised on each of these ranks, with a setting that differs.
        """
        size = self._mesh.shape.stage_size
        ranks = self._mesh.copy_ranks[self._mesh.place_in_copy % size :: size]
        self._compare(words, ranks, self._mesh.pp_group, 1)

    def refuse_unlike_parts(self, words: Sequence[int], group: dist.ProcessGroup) -> None:
        """Compare the settings of the ranks that share an optimizer; collective if they differ.

        Args:
            words: Words of the ranks of `group`.
            group: These ranks.

        Raises:
            RankMismatchError: Raised on each of these ranks, with a setting that differs.
        """
        self._compare(words, dist.get_process_group_ranks(group), group, len(words))

    def refuse_unlike_copies(self, words: Sequence[int], group: dist.ProcessGroup) -> None:
        """Compare the settings of ranks that each update the same weights; collective if they differ.

        Numbers that an optimizer computes from gradients differ between unlike GPUs by rounding: they may.

        Args:
            words: Words of the ranks of `group`.
            group: These ranks.

        Raises:
            RankMismatchError: Raised on each of these ranks, with a setting that differs by more than `ROUNDING`.
        """
        if len(set(words)) > 1:
            self._refuse(self._gathered(group, len(words)), dist.get_process_group_ranks(group), ROUNDING)

    def _compare(
        self,
        words: Sequence[int],
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        size: int,
        known: Known | None = None,
    ) -> list[Told]:
        """Refuse what differs among ranks of which `size` neighbours each have the same parameters, or among all of them.

        Returns:
            The facts of every rank, where their words differ; else nothing.
        """
        stages = [words[start : start + size] for start in range(0, len(words), size)]
        if len(set(words)) == 1 or (self._stages_differ and all(len(set(stage)) == 1 for stage in stages)):
            return []
        everyone = self._gathered(group, len(words), known)
        for start in range(0, len(words), size):
            self._refuse(everyone[start : start + size], ranks[start : start + size])
        if _same_groups([told.kinds for told in everyone]):
            self._refuse(everyone, ranks)
        self._stages_differ = self._stages_differ or len(stages) > 1
        return everyone

    def _gathered(self, group: dist.ProcessGroup | None, size: int, known: Known | None = None) -> list[Any]:
        """Answers of all `size` ranks of a group, in their order."""
        everyone: list[Any] = [None for _ in range(size)]
        used, now = known or self.known()
        dist.all_gather_object(everyone, self._told(used, now), group=group)
        return everyone

    def _told(self, used: _Spelled, now: _Spelled) -> Told:
        rates = self.rates.told() if self.rates is not None else {}
        return Told(used.settings, now.settings, self._kinds_of_groups(), rates, self.hooked)

    def _now(self) -> _Spelled:
        """Spelled anew only where a value is another one: it is asked for several times a step."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        objects = [*(value for group in groups for value in group.values()), *self._states]
        if len(objects) == len(self._objects) and all(map(operator.is_, objects, self._objects)) and not self._mutable:
            return self._last
        values = [
            (key, _kept(value))
            for group in groups
            for key, value in group.items()
            if key not in UNTOLD and isinstance(value, PLAIN)
        ]
        values += [(STATE, state) for state in self._states]
        self._objects, self._mutable = objects, any(isinstance(value, list) for _, value in values)
        if values != self._values:
            settings, self._values = self._spell(), values
            states = [
                state for one, state in zip(self._optimizers, self._states, strict=True) for _ in one.param_groups
            ]
            # A stage whose parameters are all frozen has none, which alone makes no difference.
            text = repr(settings) + (repr(states) if GONE in states else "")
            told = [group | ({STATE: state} if state else {}) for group, state in zip(settings, states, strict=True)]
            self._last = _Spelled(told, hashlib.blake2b(text.encode(), digest_size=8).digest())
        return self._last

    def _spell(self) -> Settings:
        return [
            {key: repr(value) for key, value in group.items() if key not in UNTOLD and isinstance(value, PLAIN)}
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def _kinds_of_groups(self) -> list[list[str]]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [[self._kinds[id(p)] for p in group["params"] if id(p) in self._kinds] for group in groups]

    def _refuse(self, everyone: Sequence[Told], ranks: Sequence[int], rounding: float = 0.0) -> None:
        """If these ranks, with what each of them told, differ in a setting of one group by more than `rounding` of it."""
        first = everyone[0]
        for rank, told in zip(ranks[1:], everyone[1:], strict=True):
            for then, now in ((first.used, told.used), (first.now, told.now)):
                for index, (one, other) in enumerate(zip(then, now, strict=False)):
                    shared = (key for key in one if key in other)
                    key = next((key for key in shared if _differ(one[key], other[key], rounding)), None)
                    if key is not None:
                        self._raise(index, key, (ranks[0], one[key]), (rank, other[key]))
            odd = next((name for name, value in first.rates.items() if told.rates.get(name, value) != value), None)
            if odd is not None:
                self._raise_rate(odd, (ranks[0], first.rates[odd]), (rank, told.rates[odd]))

    def _raise_hooks(self, name: str, rank: int, other: int) -> None:
        describe = self._mesh.shape.describe
        raise RankMismatchError(
            f"{name} has a gradient hook (register_hook) on {describe(rank)} and none on {describe(other)}: each of them has a shard of the "
            "gradient, and all must run the hook to give it the whole. Code of a callback, a library or a loop registers hooks on some ranks "
            "only (wandb.watch on the main process, as WANDB_WATCH=all or gradients lets transformers do). Do it on every rank, or leave it "
            "out (WANDB_WATCH=false)."
        )

    def _raise_rate(self, name: str, one: tuple[int, str], other: tuple[int, str]) -> None:
        said = " and ".join(f"{value} on {self._mesh.shape.describe(rank)}" for rank, value in (one, other))
        raise RankMismatchError(
            f"{name} of the model is {said} (0.0 in evaluation mode): these ranks train one model together. Code sets a dropout rate "
            "or an epsilon, or calls eval() or train(), on some ranks only (`if accelerator.is_main_process:`), or computes the rate from "
            "what a rank has of the data. Do it on every rank."
        )

    def _raise(self, index: int, key: str, one: tuple[int, str], other: tuple[int, str]) -> None:
        said = " and ".join(f"{value} on {self._mesh.shape.describe(rank)}" for rank, value in (one, other))
        raise RankMismatchError(
            f"{key} of parameter group {index} of the optimizer is {said}: these ranks train one model together, and would change "
            "it unlike each other. Code of a callback, a Trainer subclass or a loop changes param_groups, clears the state or steps the "
            "scheduler, on some ranks only (`if state.is_world_process_zero:`, `if accelerator.is_main_process:`). Do it on every "
            "rank; if the optimizer's own step computes it from gradients, use another optimizer."
        )


def _differ(one: str, other: str, rounding: float) -> bool:
    """Whether two settings, as they are spelled, differ by more than `rounding` of the larger one if they are numbers."""
    try:
        return one != other and not (rounding and math.isclose(float(one), float(other), rel_tol=rounding))
    except ValueError:
        return True


def _kept(value: Any) -> Any:
    """A value that stays what it is: a list may be changed in place."""
    return list(value) if isinstance(value, list) else value


def _same_groups(everyone: Sequence[list[list[str]]]) -> bool:
    """Whether group i of one stage is group i of another, by the kinds of parameters that they have.

    Groups of single blocks have the same kinds in several groups. A kind that no group has twice may be of such groups.
    """
    if len({len(groups) for groups in everyone}) > 1:
        return False
    homes: dict[str, set[int]] = {}
    for groups in everyone:
        for index, kinds in enumerate(groups):
            for kind in kinds:
                homes.setdefault(kind, set()).add(index)
    repeats = any(len(set(kinds)) < len(kinds) for groups in everyone for kinds in groups)
    return repeats and all(len(indices) == 1 for indices in homes.values())
