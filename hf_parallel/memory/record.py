"""Records what a step of a model takes and gives back on a GPU, part by part, on few blocks and on fake tensors.

Three lengths are run; what a tensor takes is a parabola through them. So a second or two of work stands for any depth,
rows and length.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from hf_parallel.compat.fake_cuda import fake_cuda
from hf_parallel.compat.torch_tools import FakeTensorMode
from hf_parallel.errors import ConfigError, PlanError, UnsupportedError
from hf_parallel.memory.adapted import adapt
from hf_parallel.memory.allocations import Allocations, Block
from hf_parallel.memory.block import LENGTHS, REFUSALS
from hf_parallel.memory.fakes import give_memory, maskless_attention
from hf_parallel.memory.heads import heads_of
from hf_parallel.memory.layers import with_layers
from hf_parallel.memory.made_by import Known, known_of, made_between, module_of
from hf_parallel.memory.meter import Meter
from hf_parallel.memory.moments import Batch, Change, Recorded, summed
from hf_parallel.memory.terms import Precision
from hf_parallel.memory.unread import build_on_meta
from hf_parallel.memory.variant import PLAIN, Variant
from hf_parallel.memory.widths import is_of_width, width_of
from hf_parallel.model.stack import blocks_of, candidate_stacks


BLOCKS: Final = 3  # the one in the middle stands for all
MIDDLE: Final = 1
PARTS: Final = ("embedding", "forward", "loss", "head", "backward")
# Multiples of the chunks, of up to 256 tokens, to which some models (Mamba 2) fill up a row; of no usual width either.
LONG: Final = (4352, 5888, 7424)
RAW: Final = {"mm", "addmm", "_to_copy"}  # of logits, what every head makes
FILLED: Final = 0.02  # of what a block takes: more that does not grow with the tokens is a row that is filled up


class Size(NamedTuple):
    """A change of memory at one length: bytes, and what they are of."""

    size: float
    whole: bool
    is_gradient: bool
    is_gathered: bool
    is_cast: bool
    order: int
    readers: int
    heads: tuple[int, int]
    width: int
    is_sent: bool
    is_routed: bool


Run = dict[str, list[Size]]

MOST_FOUND: Final = 64
# What is recorded follows from these alone, and takes seconds: files and layouts of one model have it in common.
_FOUND: Final[dict[tuple[Any, ...], Recorded | None]] = {}


def record_step(config: Any, precision: Precision, variant: Variant = PLAIN) -> Recorded | None:
    """The changes of memory in forward and backward of one row; None if the model cannot be run on fake tensors.

    Args:
        config: A transformers config; it is not changed.
        precision: See `Layout`.
        variant: The way in which the step runs.
    """
    key = _key(config, precision, variant)
    if key is None:
        return _record(config, precision, variant)
    if key not in _FOUND:
        while len(_FOUND) >= MOST_FOUND:
            _FOUND.pop(next(iter(_FOUND)))
        _FOUND[key] = _record(config, precision, variant)
    return _FOUND[key]


def _key(config: Any, precision: Precision, variant: Variant) -> tuple[Any, ...] | None:
    """The input of a recording without the depth of the model; None for a config that has no bytes, such as one of a local class."""
    few = with_layers(config, BLOCKS)
    if type(config).__module__.startswith("transformers."):  # where others come from may say which code they run
        few.name_or_path = ""
    try:
        return type(config), pickle.dumps(few), precision, variant
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _record(config: Any, precision: Precision, variant: Variant) -> Recorded | None:
    config = with_layers(config, BLOCKS)
    found = _recorded(config, precision, variant, LENGTHS)
    if found is None or not _fills_rows(found):
        return found
    long = _recorded(config, precision, variant, LONG)
    return found if long is None else _with_filling(long, config, precision, variant)


def _with_filling(long: Recorded, config: Any, precision: Precision, variant: Variant) -> Recorded:
    """The same with the tokens up to a multiple of which a row is filled up, and the part of a block's bytes that are of these.

    The first token of such a chunk takes all of it, the second one of the rest alone.
    """
    runs = [_run(config, LONG[0] + more, precision, variant)[0]["forward"] for more in range(3)]
    kept = [sum(one.size for one in run if not (one.is_gradient or one.is_cast)) for run in runs]
    rest, each = kept[2] - kept[1], summed(long.forward, Batch(1, 1)).kept
    filled = each - rest
    if filled <= 0:
        return long
    return replace(long, chunk=max(1, round((kept[1] - kept[0] - rest) / filled)), filled=filled / each)


def _recorded(config: Any, precision: Precision, variant: Variant, lengths: Sequence[int]) -> Recorded | None:
    """A step as it runs at three lengths; None if another length runs other operations, as a scan of token after token does."""
    runs: list[Run] = []
    element, steps = 0, (0, 0)
    try:
        for length in lengths:
            run, element, steps = _run(config, length, precision, variant)
            runs.append(run)
            if _flags(runs[-1]) != _flags(runs[0]):
                return None
    except (*REFUSALS, ConfigError, PlanError, UnsupportedError):
        return None
    parts = [tuple(_change(own, lengths) for own in zip(*(run[name] for run in runs), strict=True)) for name in PARTS]
    embedding, forward, loss, head, backward = parts
    again = variant.checkpoint is not None
    return Recorded(embedding, forward, loss, head, backward, runs_again=again, element=element, steps=steps)


def _fills_rows(recorded: Recorded) -> bool:
    """Whether a block works on more tokens than a row of the shortest lengths has."""
    filled = sum(max(0.0, one.fixed) for one in recorded.forward if not (one.is_gradient or one.is_cast))
    return filled > FILLED * summed(recorded.forward, Batch(max(LENGTHS), max(LENGTHS))).most


def _flags(run: Run) -> dict[str, list[tuple[Any, ...]]]:
    """Kinds of the changes of each part, without their sizes."""
    return {name: [one[1:-1] for one in run[name]] for name in PARTS}  # what is routed shows at several lengths


def _change(own: Sequence[Size], lengths: Sequence[int]) -> Change:
    sizes = [one.size for one in own]
    _, whole, is_gradient, is_gathered, is_cast, order, readers, heads, width, is_sent, _ = own[0]
    is_routed = all(one.is_routed for one in own)
    is_gathered |= is_routed and whole  # ranks that share the sequence gather it before its tokens go to experts
    step, first = lengths[1] - lengths[0], lengths[0]
    square = (sizes[2] - 2 * sizes[1] + sizes[0]) / (2 * step**2)
    linear = (sizes[1] - sizes[0]) / step - square * (2 * first + step)
    fixed = sizes[0] - linear * first - square * first**2
    passing = whole and not fixed, is_gradient, is_gathered and not fixed
    return Change(fixed, linear, square, *passing, is_cast, order, readers, heads, is_routed, width, is_sent)


def _built(config: Any, precision: Precision, variant: Variant) -> nn.Module:
    """The model, of few blocks and without values, as it computes."""
    dtype = torch.bfloat16 if precision == "half" else torch.float32
    given = {} if variant.attention is None else {"attn_implementation": variant.attention}
    model: nn.Module = build_on_meta(config, dtype=dtype, **given).train()
    if variant.adapted:
        adapt(model, variant.adapted, on_experts=variant.on_experts)
    if variant.gathers and precision == "autocast":
        for block in blocks_of(model, candidate_stacks(model)[0]):
            block.to(torch.bfloat16)
    return model


def _run(config: Any, length: int, precision: Precision, variant: Variant) -> tuple[Run, int, tuple[int, int]]:
    """Bytes of each change, and what it is of (the residual stream, a gradient, a norm over all heads, a cast of a parameter).

    And the bytes of an element of what enters a block, and the steps of `Recorded`.
    """
    model = _built(config, precision, variant)
    name_of_stack = candidate_stacks(model)[0]
    blocks = blocks_of(model, name_of_stack)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    memory, device = Allocations(1), torch.device("cuda", 0)
    marks: list[tuple[str, int]] = []
    meter = Meter("cuda", str, fake, told_bytes=0, memory=memory)
    with fake_cuda(lambda name: None), contextlib.ExitStack() as stack:
        meter.name(model)
        give_memory(model, device, fake, meter.follow)
        if variant.checkpoint is not None:
            variant.checkpoint(model, name_of_stack)
        stack.enter_context(_marking(blocks, memory, marks))
        stack.enter_context(maskless_attention(model))
        stack.enter_context(meter)
        memory.begin()
        with fake:
            ids = torch.empty((1, length), dtype=torch.int64, device=device)
        is_cast = precision == "autocast" or (precision == "half" and variant.mixed)
        cast = torch.autocast("cuda", torch.bfloat16) if is_cast else contextlib.nullcontext()
        with cast:
            output = model(input_ids=ids, labels=ids, use_cache=False)
            loss = output["loss"]
            del output
            marks.append(("loss", len(memory.changes)))
        marks.append(("dropped", len(memory.changes)))  # autocast's casts that nothing else keeps
        loss.backward()
        for parameter in model.parameters():
            meter.mark(parameter.grad, "gradients")
    known = known_of(model, blocks[MIDDLE], length, hidden=config.get_text_config().hidden_size)
    ends, text = dict(marks), config.get_text_config()
    steps = _steps(memory.changes[ends["head"] : ends["loss"]], (1, length, text.vocab_size))
    return _by_part(memory, ends, text, known), ends["element"], steps


def _steps(changes: Sequence[tuple[Block, int]], logits: tuple[int, ...]) -> tuple[int, int]:
    """Number of results of the shape of logits that are no product and no copy, and of those that stay until the backward."""
    stay = {id(block): change > 0 for block, change in changes if block.shape == logits and block.op not in RAW}
    return len(stay), sum(stay.values())


@contextlib.contextmanager
def _marking(blocks: Sequence[nn.Module], memory: Allocations, marks: list[tuple[str, int]]) -> Iterator[None]:
    """Inside, the number of changes is noted when a block's forward begins, and when the gradient of what goes into it is there.

    And the bytes of an element of that, as "element".
    """

    def mark(name: str) -> None:
        marks.append((name, len(memory.changes)))

    def enter(index: int, args: Any, kwargs: Any) -> None:
        mark(f"forward {index}")
        entering = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        if entering is not None and index == MIDDLE:
            marks.append(("element", entering.element_size()))
        if entering is not None and entering.requires_grad:
            entering.register_hook(lambda gradient: mark(f"backward {index}"))

    def leave(output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        mark("head")
        first.register_hook(lambda gradient: mark("backward"))

    hooks = [
        block.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: enter(index, args, kwargs),
            with_kwargs=True,
        )
        for index, block in enumerate(blocks)
    ]
    hooks.append(blocks[-1].register_forward_hook(lambda module, args, output: leave(output)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _by_part(
    memory: Allocations,
    marks: dict[str, int],
    text: Any,
    known: Known,
) -> Run:
    """The changes between marks."""
    hidden = text.hidden_size
    wide = 0 if known.stacks else width_of(text, hidden)
    ends = {
        "embedding": (0, marks["forward 0"]),
        "forward": (marks[f"forward {MIDDLE}"], marks[f"forward {MIDDLE + 1}"]),
        "loss": (marks["head"], marks["loss"]),
        "head": (marks["dropped"], marks["backward"]),
        "backward": (marks[f"backward {MIDDLE + 1}"], marks[f"backward {MIDDLE}"]),
    }

    # What the forward makes is in the backward, too; the gradients there are no results of these modules.
    made = [block for block, _ in memory.changes[slice(*ends["forward"])]]
    shared_between = made_between(made, known.between)
    all_heads = {
        id(block) for block in made if {("", module_of(block)), (block.op, module_of(block))} & known.gathered
    }

    def about(block: Block, change: int) -> Size:
        whole = len(block.shape) in (2, 3) and block.shape[-1] in (hidden, 1)
        whole = whole and (block.op, module_of(block)) not in known.shared and id(block) not in shared_between
        is_cast, is_routed = block.op == "_to_copy" and block.shape in known.shapes, known.is_routed(block.shape)
        heads = (0, 0) if whole else heads_of(block.shape, text)
        width = wide * (heads == (0, 0) and is_of_width(block.shape, wide, hidden))
        order, readers = known.columns.get(module_of(block), (0, 0))
        is_input = whole and block.op == "_to_copy" and not is_cast
        # Masks are of all heads, so every rank has them.
        of_all = id(block) in all_heads or (len(block.shape) == len("bhqk") and block.shape[1] == 1 != block.shape[-2])
        return Size(
            *(float(change), whole, block.kind == "gradients", of_all, is_cast),
            *(order, readers * is_input, heads, width),
            is_sent=(block.op, module_of(block)) in known.sent,
            is_routed=is_routed,
        )

    # What the embedding made and a frame holds until the model returns: where there are stages, it is not on the last one.
    before = {id(block) for block, _ in memory.changes[: marks["forward 0"]]}
    changes = {name: memory.changes[begin:end] for name, (begin, end) in ends.items()}
    changes["loss"] = [one for one in changes["loss"] if id(one[0]) not in before]
    return {name: [about(*one) for one in _ordered(own)] for name, own in changes.items()}


def _ordered(changes: Sequence[tuple[Block, int]]) -> Iterator[tuple[Block, int]]:
    """The same, with what is given back at once in an order of its own: autocast drops its casts in any."""
    for is_less, alike in itertools.groupby(changes, key=lambda one: one[1] < 0):
        own = list(alike)
        yield from sorted(own, key=_place) if is_less else own


def _place(one: tuple[Block, int]) -> tuple[Any, ...]:
    block, _ = one
    return block.where, block.op, block.dtype, len(block.shape), block.shape
