"""Bytes that each part of a training step takes and leaves, recorded on a few blocks, for any rows, length and tp ranks."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from hf_parallel.memory.heads import sharing
from hf_parallel.pipeline_parallel.schedule.actions import Action
from hf_parallel.tensor_parallel.units import NONE, most_of


TEMPORARY: Final = "temporaries"
SENT: Final = "gradients on their way"
GATHERED: Final = "gathered parameters"  # of blocks, which have them whole while they run
NAMES: Final = ("activations", "logits and loss", "gradients", "recomputed blocks", TEMPORARY, SENT, GATHERED)


@dataclass(frozen=True, slots=True)
class Change:
    """Memory that is taken, or given back if negative.

    Attributes:
        fixed: Bytes whatever the batch: of gradients, and of casts of weights.
        linear: Bytes for each token.
        square: Bytes for each token and token of a row.
        whole: Whether every tensor-parallel rank has all of it: it is of the width of the residual stream.
        is_gradient: Whether it is the gradient of a parameter.
        is_gathered: Whether every such rank has all of it though they share the sequence: a norm over all heads takes it.
        is_cast: Whether it is a cast of a parameter.
        order: Place of the product that it is of, among those of a module that tensor parallelism cuts into columns, from 1; else 0.
        readers: Number of such products that read what it is a cast of; 0 if it is none.
        heads: Number of heads that it is of, and of those of keys and values, which ranks share as whole ones; zeros if it is of none.
        is_routed: Whether it is of the experts: of their weights, or of the tokens that go to them.
        width: Width of the feed-forward part, if it is of that; else 0.
        is_sent: Whether it is the result of a product that tensor-parallel ranks hand to each other: a sum, or a part to be gathered.
    """

    fixed: float
    linear: float
    square: float
    whole: bool
    is_gradient: bool = False
    is_gathered: bool = False
    is_cast: bool = False
    order: int = 0
    readers: int = 0
    heads: tuple[int, int] = (0, 0)
    is_routed: bool = False
    width: int = 0
    is_sent: bool = False


@dataclass(frozen=True)
class Part:
    """Bytes of a part of a step.

    Attributes:
        most: Bytes beyond what was in use when it began.
        kept: Part of `most` that is in use when it ends; gradients of parameters and casts of weights are left out.
        casts: Bytes of casts of weights that are in use when it ends.
    """

    most: float
    kept: float
    casts: float


@dataclass(frozen=True)
class Recorded:
    """The changes of a step of a model on one GPU, by part.

    Attributes:
        embedding: Before the first block.
        forward: A block.
        loss: After the last block, until the loss is there.
        head: The backward of that.
        backward: A block.
        runs_again: Whether the block ran again in its backward: what it then takes is in `backward`, and `forward` keeps little.
        element: Bytes of an element of what enters a block, which norms in fp32 may have widened; 0 if it is not known.
        chunk: Tokens up to a multiple of which a block fills a row up; 1 if it does not.
        filled: Part of the bytes of a block that are of filled rows.
        steps: Number of results that scales and caps of logits make of the head's product, and of those that autograd keeps.
    """

    embedding: tuple[Change, ...]
    forward: tuple[Change, ...]
    loss: tuple[Change, ...]
    head: tuple[Change, ...]
    backward: tuple[Change, ...]
    runs_again: bool = False
    element: int = 0
    chunk: int = 1
    filled: float = 0.0
    steps: tuple[int, int] = (0, 0)

    @functools.cached_property
    def _sums(self) -> dict[Batch, Parts]:
        return {}

    def parts(self, batch: Batch) -> Parts:
        """Sum up the bytes of each part; kept for the batches that were asked for."""
        found = self._sums.get(batch)
        if found is None:
            whole = replace(batch, with_fixed=True)  # what is outside of the blocks is there in any case
            beyond = math.ceil(batch.length / self.chunk) * self.chunk / batch.length - 1
            filled = replace(batch, tokens=batch.tokens * (1 + self.filled * beyond))
            found = self._sums[batch] = Parts(
                embedding=summed(self.embedding, batch),
                forward=summed(self.forward, filled),
                loss=summed(self.loss, whole),
                head=summed(self.head, whole),
                backward=summed(self.backward, filled),
            )
        return found


@dataclass(frozen=True)
class Parts:
    """Bytes of the parts of `Recorded`."""

    embedding: Part
    forward: Part
    loss: Part
    head: Part
    backward: Part


@dataclass(frozen=True)
class Batch:
    """The rows and tokens that a part of a step runs on, and what of it is sharded.

    Attributes:
        tokens: Tokens of the batch.
        length: Tokens of a row.
        tp_size: Ranks that share the products.
        sequence_parallel: Whether they share the sequence between these, too.
        with_fixed: Whether gradients and casts of whole weights are there.
        with_gradients: Whether gradients of the recorded parameters are there.
        whole_experts: Whether every tensor-parallel rank has all experts whole.
        numbers: See `ModelShape`.
        ep_size: Number of replicas that share the experts of each block, of which they get as many tokens as they send.
        exchanging: Number of ranks that exchange parts of a row for heads of it, and so have whole rows of some heads.
    """

    tokens: float
    length: int
    tp_size: int = 1
    sequence_parallel: bool = False
    with_fixed: bool = True
    with_gradients: bool = True
    whole_experts: bool = False
    numbers: frozenset[int] = NONE
    ep_size: int = 1
    exchanging: int = 1

    def parts_of(self, one: Change) -> float:
        """Number by which what a change is of is divided on the rank with most of it."""
        if one.is_routed and self.whole_experts:
            return 1.0
        if one.heads[0]:
            return sharing(*one.heads, self.tp_size, self.numbers)
        if one.width and self.tp_size > 1:
            return one.width / most_of(one.width, self.tp_size)
        return float(self.tp_size)

    def filled_up(self, one: Change) -> float:
        """Factor of what grows with the square of the length: ranks that exchange fill heads up to as many on each; masks are of all."""
        if self.exchanging == 1:
            return 1.0
        heads = round(one.heads[0] / self.parts_of(one)) if one.heads[0] else 1
        return math.ceil(heads / self.exchanging) * self.exchanging / heads


def summed(changes: Iterable[Change], batch: Batch) -> Part:
    """Sum of what a part takes and leaves."""
    now = most = kept = casts = 0.0
    shares = batch.sequence_parallel and batch.tp_size > 1
    for one in changes:
        passing = batch.tokens * one.linear
        if one.square:
            passing += batch.tokens * one.square * batch.length * batch.filled_up(one)
        # Of the input, one part is kept as it came, twice as wide, and gathered again for all of them.
        if shares and one.readers:
            passing *= 2 / one.readers
        parts = batch.parts_of(one)
        if not (one.is_gathered or (one.whole and not batch.sequence_parallel)):
            passing /= parts
        is_there = batch.with_fixed and (batch.with_gradients or not one.is_gradient)
        # Ranks cast by hand, and for no longer, the weights of products that send: the first reader of an input, all that gather it.
        is_there &= not (one.is_cast and batch.tp_size > 1 and (one.order == 1 or (shares and one.order)))
        fixed = one.fixed / parts * is_there / (batch.ep_size if one.is_routed else 1)
        now += passing + fixed
        most = max(most, now)
        kept += 0.0 if one.is_gradient else passing
        casts += 0.0 if one.is_gradient else fixed
    return Part(most, kept, casts)


@dataclass(frozen=True)
class StageParts:
    """Bytes that a microbatch of one stage takes, by part.

    Attributes:
        kept: Bytes from its forward to its backward, of the loss left out.
        entering: Part of `kept` that the embedding leaves.
        casts: Casts of weights that its forward has until it ends.
        block: Bytes that one block takes in the forward beyond what it keeps.
        again: Bytes of blocks that run again in the backward.
        backward: Most that the backward of a block takes.
        gradients: Gradients of its parameters, when its first backward has ended.
        late: Part of `gradients` of its first block and the embedding: it comes last.
        table: Part of `gradients` of the head.
        loss: After the last block, on the last stage.
        head: The backward of that.
        once: Bytes of `loss` that one of several losses keeps which wait for their backward, whatever their number.
        message: Bytes of a message between stages.
        sent: The same of what the stage sends, and of the gradient that comes back for it; 0 on the last stage.
    """

    kept: float
    entering: float
    casts: float
    block: float
    again: float
    backward: float
    gradients: float
    late: float = 0.0
    table: float = 0.0
    loss: Part | None = None
    head: Part | None = None
    once: float = 0.0
    message: float = 0.0
    sent: float = 0.0


class Moment(NamedTuple):
    """A moment of a rank's step in which it may have most, without any bytes.

    Attributes:
        kind: Kind of pass that runs.
        place: Index of the stage that runs, among the stages of the rank.
        held: Microbatches between their forward and their backward, of each stage of the rank.
        losses: Microbatches whose loss waits for its backward, or has had it.
        heads: Number of `losses` that have had their backward.
        reached: Progress of the gradients of each stage.
        is_sent: Whether the last backward of the stage runs, and gradients are on their way.
        arriving: Messages of other stages that are received ahead: the next payload, the next gradient.
    """

    kind: Literal["forward", "loss", "head", "backward", "embedding", "end"]
    place: int
    held: tuple[int, ...]
    losses: int
    heads: int
    reached: tuple[int, ...]
    is_sent: bool
    arriving: int = 0


WIDENED: Final = 2.0  # a gradient of 16 bit that is summed in fp32


class Sending(NamedTuple):
    """Bytes of gradients while they are on their way to other replicas.

    Attributes:
        among: Bytes of a message beside the gradients that it is of, while blocks still run.
        last: The same of the last message, which may be of a large table.
        left: What a gradient that was sent still takes, as a multiple of what it took: a sum in fp32, or a part of that.
        message: Bytes of gradients that fill a message: fewer are not sent until the last one is there.
    """

    among: float = 0.0
    last: float = 0.0
    left: float = 1.0
    message: float = 0.0


NOTHING, TABLE, EARLY, ALL = range(4)  # gradients of a stage: none, the head's, all but those that come last, all


def moments_of(actions: Sequence[Action], stages: Sequence[int], last: int | None) -> tuple[Moment, ...]:
    """The moments of a rank's step of which one has most, whatever its stages take; those with less of all are left out.

    Args:
        actions: Actions of the rank, in order.
        stages: Stages of the rank.
        last: The stage with the loss; None if it is on another rank.
    """
    places = {stage: place for place, stage in enumerate(stages)}
    held, reached = [0] * len(stages), [NOTHING] * len(stages)
    left = Counter(action.stage for action in actions if action.kind in "BW")
    losses = heads = 0
    found: dict[Moment, None] = {}

    ahead = 0

    def note(kind: Any, place: int, *, is_sent: bool = False) -> None:
        found[Moment(kind, place, tuple(held), losses, heads, tuple(reached), is_sent, ahead)] = None

    for action, coming in zip(actions, _received_ahead(actions, last), strict=True):
        ahead = coming
        place, has_loss = places[action.stage], action.stage == last
        if action.kind == "F":
            held[place] += 1
            note("forward", place)
            if has_loss:
                note("loss", place)
                losses += 1
            continue
        is_sent = left[action.stage] == 1
        if action.kind in "BI" and has_loss:
            note("head", place)
            heads += 1
            reached[place] = max(reached[place], TABLE)
        note("backward", place, is_sent=is_sent)
        if action.kind in "BW":
            left[action.stage] -= 1
            held[place] -= 1
            losses, heads = losses - has_loss, heads - has_loss
            reached[place] = max(reached[place], EARLY)
            note("embedding", place, is_sent=is_sent)
            reached[place] = ALL
    ahead = 0
    note("end", 0, is_sent=True)
    return _largest(found)


def _received_ahead(actions: Sequence[Action], last: int | None) -> list[int]:
    """Messages that a rank has room for during each action: the payload of a forward to come, and the gradient of one that was."""
    payloads = [action.kind == "F" and action.stage > 0 for action in actions]
    begun: dict[tuple[int, int], int] = {}
    gradients = [0] * len(actions)
    for index, action in enumerate(actions):
        place = action.stage, action.microbatch
        if action.kind == "F":
            begun[place] = index
        elif action.kind in "BI" and action.stage != last:
            for between in range(begun.get(place, 0), index):
                gradients[between] = 1
    return [gradients[index] + any(payloads[index + 1 :]) for index in range(len(actions))]


def _largest(found: Iterable[Moment]) -> tuple[Moment, ...]:
    """The moments of which, among those that differ only in what is held, no other holds as much of everything."""
    alike: dict[Moment, list[Moment]] = {}
    for one in found:
        alike.setdefault(one._replace(held=()), []).append(one)
    return tuple(
        one
        for own in alike.values()
        for one in own
        if not any(
            other is not one and all(a <= b for a, b in zip(one.held, other.held, strict=True)) for other in own
        )
    )


def terms_at(moment: Moment, stages: Sequence[StageParts], sent: Sending, gathered: float = 0.0) -> tuple[float, ...]:
    """Bytes of each of `NAMES`.

    Args:
        moment: Moment of a rank.
        stages: Parts of the rank's stages.
        sent: Gradients on their way while the last backward of a stage runs.
        gathered: Bytes of parameters that are whole while a block runs.
    """
    kind, own = moment.kind, stages[moment.place]
    kept = max(0.0, sum(count * one.kept for count, one in zip(moment.held, stages, strict=True)))
    waiting = again = 0.0
    if moment.losses or kind in ("loss", "head"):
        loss, head, once = next(
            (one.loss, one.head, one.once) for one in stages if one.loss is not None and one.head is not None
        )
        waiting = moment.losses * (loss.kept + loss.casts) + moment.heads * (head.kept + head.casts)
        waiting += loss.most if kind == "loss" else head.most if kind == "head" else 0.0
        waiting -= once * max(0, moment.losses + (kind == "loss") - 1)
    temporary = moment.arriving * own.message
    if kind == "forward":
        temporary += own.casts + own.block + own.sent
    elif kind == "loss":
        temporary += own.casts
    elif kind in ("backward", "embedding"):
        again, temporary = own.again, temporary + own.backward + own.sent
        kept += own.entering if kind == "embedding" else 0.0
    each = list(map(_gradients, stages, moment.reached))
    in_blocks = kind in ("forward", "backward", "embedding")
    on_way = 0.0
    if moment.is_sent and kind == "backward":
        # As it begins: of this pass there is none but the head's, which is widened.
        on_way = min(sent.last, WIDENED * own.table)
    elif moment.is_sent and kind == "embedding":
        if each[moment.place] >= sent.message:
            each[moment.place] *= sent.left
            on_way = sent.among
    elif moment.is_sent:
        each = [sent.left * one for one in each]
        on_way = sent.last
    return kept, max(waiting, 0.0), sum(each), again, temporary, on_way, gathered * in_blocks


def _gradients(stage: StageParts, reached: int) -> float:
    if reached == EARLY:
        return max(stage.table, stage.gradients - stage.late)
    return (0.0, stage.table, 0.0, stage.gradients)[reached]


def fullest(
    moments: Iterable[Moment], stages: Sequence[StageParts], sent: Sending, gathered: float = 0.0
) -> dict[str, float]:
    """Bytes by term at the moment with most; see `terms_at`."""
    return dict(zip(NAMES, max((terms_at(one, stages, sent, gathered) for one in moments), key=sum), strict=True))
