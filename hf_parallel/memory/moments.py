"""What a part of a training step takes and leaves, as recorded on a few blocks: sums for any rows, length and tp ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hf_parallel.pipeline_parallel.schedule.actions import Action


TEMPORARY: Final = "temporaries"
SENT: Final = "gradients on their way"


@dataclass(frozen=True, slots=True)
class Change:
    """Memory that is taken, or given back if negative.

    Attributes:
        fixed: Bytes whatever the batch: of gradients, and of casts of weights.
        linear: Bytes for each token.
        square: Bytes for each token and token of a row.
        whole: Whether every tensor-parallel rank has all of it: it is of the width of the residual stream.
        is_gradient: Whether it is the gradient of a parameter.
    """

    fixed: float
    linear: float
    square: float
    whole: bool
    is_gradient: bool = False


@dataclass(frozen=True)
class Part:
    """Bytes of a part of a step.

    Attributes:
        most: Beyond what was there when it began.
        kept: Of those, what is there when it ends; gradients of parameters and casts of weights are left out.
        casts: What is there of casts of weights when it ends.
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
    """

    embedding: tuple[Change, ...]
    forward: tuple[Change, ...]
    loss: tuple[Change, ...]
    head: tuple[Change, ...]
    backward: tuple[Change, ...]


@dataclass(frozen=True)
class Batch:
    """What a part runs on.

    Attributes:
        tokens: Of the batch.
        length: Of a row.
        tp_size: Ranks that share the products.
        sequence_parallel: Whether they share the sequence between these, too.
        with_fixed: Whether gradients and casts of whole weights are there.
        with_gradients: Whether gradients of the recorded parameters are there.
    """

    tokens: float
    length: int
    tp_size: int = 1
    sequence_parallel: bool = False
    with_fixed: bool = True
    with_gradients: bool = True


def summed(changes: Iterable[Change], batch: Batch) -> Part:
    """What a part takes and leaves."""
    now = most = kept = casts = 0.0
    for one in changes:
        passing = batch.tokens * (one.linear + one.square * batch.length)
        if not (one.whole and not batch.sequence_parallel):
            passing /= batch.tp_size
        is_there = batch.with_fixed and (batch.with_gradients or not one.is_gradient)
        fixed = one.fixed / batch.tp_size * is_there
        now += passing + fixed
        most = max(most, now)
        kept += 0.0 if one.is_gradient else passing
        casts += 0.0 if one.is_gradient else fixed
    return Part(most, kept, casts)


@dataclass(frozen=True)
class StageParts:
    """What a microbatch of one stage takes, by part.

    Attributes:
        kept: Bytes from its forward to its backward, of the loss left out.
        entering: Of `kept`, what the embedding leaves.
        casts: Of weights, that its forward has until it ends.
        block: What one block takes in the forward beyond what it keeps.
        again: Of blocks that run again in the backward.
        backward: Most that the backward of a block takes.
        gradients: Of its parameters, when its first backward has ended.
        late: Of those, what its first block and the embedding have: it comes last.
        table: Of those, what the head has.
        loss: After the last block, on the last stage.
        head: The backward of that.
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


def moments(actions: Sequence[Action], stages: Mapping[int, StageParts], sent: float) -> Iterator[dict[str, float]]:
    """Bytes by term at every moment of a rank's step that could be the one with most.

    Args:
        actions: Of the rank, in order.
        stages: Those of the rank.
        sent: Bytes of gradients on their way while the last backward of a stage runs.
    """
    kept = waiting = 0.0
    gradients = dict.fromkeys(stages, 0.0)
    left = Counter(action.stage for action in actions if action.kind in "BW")

    def at(**terms: float) -> dict[str, float]:
        return {
            "activations": max(kept, 0.0),
            "logits and loss": max(waiting, 0.0),
            "gradients": sum(gradients.values()),
        } | terms

    for action in actions:
        stage = stages[action.stage]
        if action.kind == "F":
            kept += stage.kept
            yield at(**{TEMPORARY: stage.casts + stage.block})
            if stage.loss is not None:
                yield at(**{"logits and loss": waiting + stage.loss.most, TEMPORARY: stage.casts})
                waiting += stage.loss.kept + stage.loss.casts
            continue
        on_way = {SENT: sent} if left[action.stage] == 1 else {}
        if action.kind in "BI" and stage.head is not None:
            yield at(**{"logits and loss": waiting + stage.head.most})
            waiting += stage.head.kept + stage.head.casts
            gradients[action.stage] = max(gradients[action.stage], stage.table)
        taken = {"recomputed blocks": stage.again, TEMPORARY: stage.backward} | on_way
        yield at(**taken)
        if action.kind in "BW":
            left[action.stage] -= 1
            kept -= stage.kept
            if stage.loss is not None and stage.head is not None:
                waiting -= sum(part.kept + part.casts for part in (stage.loss, stage.head))
            gradients[action.stage] = max(gradients[action.stage], stage.gradients - stage.late)
            yield at(**taken | {"activations": kept + stage.entering})
            gradients[action.stage] = stage.gradients
    yield at(**{SENT: sent})
