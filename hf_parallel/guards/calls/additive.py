"""Whether a loss function of the user's may be computed microbatch by microbatch: asked on made-up logits.

A wrong yes trains something else without a word; a no costs memory and a warning. So a function is believed only if
nothing speaks against it: value and gradient of a batch must be those of its parts, on rows of unequal length, rows of
very different losses, ignored labels and every token that the function itself names; and it must not draw random
numbers, keep state, or write to its arguments.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_parallel.compat.private_torch import own_buffers, own_parameters, version_of
from hf_parallel.compat.torch_tools import pytree
from hf_parallel.model.value_reads import ValueReads


IGNORED = -100
ROWS, LENGTH = 5, 8
TOLERANCE = 1e-5
# The rows of both parts, how far labels stand out, N as a share of the labels. The third row is the hardest.
TRIALS = (((0, 1), (2, 3, 4), 1.0, 1.0), ((0, 2, 3), (1, 4), 8.0, 0.5), ((2,), (0, 1, 3, 4), 30.0, 2.0))
LIBRARIES = frozenset(
    {"torch", "transformers", "accelerate", "hf_parallel", "threading", "logging", "multiprocessing"}
)
MOST_ELEMENTS = 2**25  # of logits at once: 128 MiB
MOST_ITEMS = 256
DEPTH = 3  # of containers in containers whose content counts as the function's state


class _RefusedError(Exception):
    """The function is not believed; the message says why."""


class _Names(TorchFunctionMode):
    """Notes which tokens a function names: numbers compared with labels, and tables with one entry a token."""

    READS = frozenset({"tolist", "numpy", "__iter__", "__array__", "__contains__"})

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.tokens: set[int] = set()
        self.reads = ValueReads([])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves([args, kwargs])
        if any(isinstance(leaf, Tensor) and not leaf.is_floating_point() for leaf in leaves):
            if getattr(func, "__name__", "") in self.READS:
                raise _RefusedError("it looks at labels one by one in Python")
            for leaf in leaves:
                self._note(leaf)
        else:
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.shape == (self.vocab_size,):
                    self._note(leaf)
        return self.reads.note(func, (args, kwargs), func(*args, **kwargs))

    def _note(self, leaf: Any) -> None:
        if isinstance(leaf, int) and not isinstance(leaf, bool):
            self.tokens.update((leaf - 1, leaf, leaf + 1))
        elif isinstance(leaf, Tensor) and leaf.shape == (self.vocab_size,):
            usual = leaf.float().median()
            odd = (leaf.float() != usual).nonzero().flatten().tolist()
            self.tokens.update((*odd[:8], *odd[-8:]))
        elif isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.numel() <= 16:
            self.tokens.update(int(value) for value in leaf.flatten().tolist())


def why_not_additive(function: Callable[..., Any], config: Any, device: torch.device | str = "cpu") -> str:
    """Why the losses of microbatches do not add up to that of the batch; empty if they do.

    The function is called on made-up logits: at most ten times, and not after the first answer that speaks
    against it. Random states and what the function keeps of these calls are put back.

    Args:
        function: `compute_loss_func`: called with outputs, labels and num_items_in_batch.
        config: Config of the model.
        device: Device of the made-up logits.
    """
    vocab_size = int(config.get_text_config().vocab_size)
    state = _State(function)
    try:
        with _random_states(device) as drawn:
            asked = _Asked(function, state.learned)
            _ask(asked, vocab_size, _named_in(config, vocab_size), torch.device(device), lambda: _quiet(state, drawn))
    except _RefusedError as refusal:
        return str(refusal)
    except Exception as error:  # noqa: BLE001  code of the user's, on logits alone, may raise anything
        return f"it cannot be computed from logits and labels alone ({type(error).__name__}: {str(error)[:100]})"
    finally:
        state.restore()
    return ""


def what_replicas_multiply(function: Callable[..., Any], config: Any, device: torch.device | str = "cpu") -> str:
    """Why a Trainer that multiplies a loss function by the number of replicas makes it another one than in one process.

    Called three times on made-up logits; see `why_not_additive` for the arguments and what is put back.

    Returns:
        Empty for a sum, divided by `num_items_in_batch` or not, and for a function that cannot be tried.
    """
    state = _State(function)
    try:
        vocab_size = int(config.get_text_config().vocab_size)
        with _random_states(device) as drawn:
            logits, labels = _batch(vocab_size, [], 1.0, 0, torch.device(device))
            count = labels[:, 1:].ne(IGNORED).sum()
            once, other, twice = (
                _value_and_gradient(_Asked(function, []), logits.repeat(rows, 1, 1), labels.repeat(rows, 1), n)[0]
                for rows, n in ((1, count), (1, 2 * count), (2, count))
            )
            if drawn():
                return ""
    except Exception:  # noqa: BLE001  code of the user's, on logits alone, may raise anything
        return ""
    finally:
        state.restore()
    if _are_same(once, other):
        return (
            "" if _are_same(twice, 2 * once) else "it does not use num_items_in_batch, and does not grow with the rows"
        )
    return "" if _are_same(once, 2 * other) else "a part of it is not divided by num_items_in_batch"


def _quiet(state: _State, drawn: Callable[[], bool]) -> None:
    if drawn():
        raise _RefusedError("it draws random numbers")
    if state.changed():
        raise _RefusedError("it keeps state between its calls")


class _Asked(NamedTuple):
    """A function, and the parameters that it may read."""

    function: Callable[..., Any]
    learned: list[Tensor]


def _ask(function: _Asked, vocab_size: int, known: list[int], device: torch.device, quiet: Callable[[], None]) -> None:
    names = _Names(vocab_size)
    for index, (first, second, scale, share) in enumerate(TRIALS):
        tokens = known if index == 0 else [*(t for t in sorted(names.tokens) if 0 <= t < vocab_size), *known]
        logits, labels = _batch(vocab_size, tokens, scale, index, device)
        count = labels[:, 1:].ne(IGNORED).sum() * share
        whole = _value_and_gradient(function, logits, labels, count, names)
        quiet()
        if names.reads.found:
            raise _RefusedError(
                "it reads values of logits or labels, or compares how many rows they have, by which it may go on in another way"
            )
        parts = [
            _value_and_gradient(function, logits[list(rows)], labels[list(rows)], count) for rows in (first, second)
        ]
        gradient = torch.empty_like(whole[1])
        gradient[list(first)], gradient[list(second)] = parts[0][1], parts[1][1]
        _same("its parts do not add up to it", whole[0], parts[0][0] + parts[1][0])
        _same("its gradient in a row depends on other rows", whole[1], gradient)
        if index == 0:
            twice = _value_and_gradient(function, logits, labels, 2 * count)
            _same("it is not divided by num_items_in_batch", whole[0], 2 * twice[0])
        quiet()


def _batch(vocab_size: int, tokens: list[int], scale: float, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits f[B S V] and labels i[B S] of rows of unequal length and difficulty, `tokens` among them."""
    generator = torch.Generator().manual_seed(seed)
    room = max(LENGTH, min(MOST_ELEMENTS // max(1, ROWS * vocab_size), 3 * len(tokens) // ROWS + LENGTH))
    labels = torch.randint(0, vocab_size, (ROWS, room), generator=generator)
    labels[0, : room // 2] = labels[1, -2:] = labels[3, 3] = IGNORED
    # Each named token in one row, at a place that counts; half of the places keep what they have.
    places = [(row, column) for column in range(1, room) for row in range(ROWS) if (row + column) % 2]
    counted = [place for place in places if labels[place] != IGNORED]
    for place, token in zip(counted, tokens, strict=False):
        labels[place] = token
    logits = torch.randn(ROWS, room, vocab_size, generator=generator)
    hits = torch.nn.functional.pad(labels, (0, 1))[:, 1:].clamp(min=0).unsqueeze(-1)
    sure = torch.tensor([0.0, 1.0, -1.0, 0.3, 2.0])[:, None, None] * scale  # right, wrong or undecided, by rows
    logits.scatter_add_(-1, hits, sure.expand(ROWS, room, 1))
    return logits.to(device), labels.to(device)


def _value_and_gradient(
    asked: _Asked, logits: Tensor, labels: Tensor, count: Tensor, names: _Names | None = None
) -> tuple[Tensor, Tensor]:
    leaf, given = logits.clone().requires_grad_(), labels.clone()
    with torch.enable_grad():
        if names is not None:
            names.reads = ValueReads([leaf, given])
        with names or nullcontext():
            value = asked.function(CausalLMOutputWithPast(logits=leaf), given, num_items_in_batch=count.clone())
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise _RefusedError("it returns no scalar")
        gradient, *others = torch.autograd.grad(value.sum(), [leaf, *asked.learned], allow_unused=True)
    if any(other is not None for other in others):
        raise _RefusedError("it reads parameters, which every stage must train")
    if gradient is None:
        raise _RefusedError("it does not depend on the logits")
    if not torch.equal(given, labels) or not torch.equal(leaf, logits):
        raise _RefusedError("it writes to its arguments")
    if not value.isfinite().all():
        raise _RefusedError(f"it is {float(value)} on made-up logits")
    return value.detach().double().sum(), gradient.double()


def _same(what: str, whole: Tensor, other: Tensor) -> None:
    if not _are_same(whole, other):
        raise _RefusedError(what)


def _are_same(whole: Tensor, other: Tensor) -> bool:
    scale = float(whole.abs().max())
    return scale > 0.0 and float((whole - other).abs().max()) <= TOLERANCE * scale


def _named_in(config: Any, vocab_size: int) -> list[int]:
    """Tokens that a model's config names, and the ends of the vocabulary; all tokens of a small one."""
    if vocab_size <= 256:
        return list(range(vocab_size))
    found = {0, 1, 2, 3, vocab_size - 1}
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if name.endswith(("token_id", "token_index")):
                found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    return sorted(token for token in found if 0 <= token < vocab_size)


# -- what a function draws and keeps ---------------------------------------------------------------------------


@contextmanager
def _random_states(device: torch.device | str) -> Iterator[Callable[[], bool]]:
    """Around calls; yields a function that says whether random numbers were drawn. The states are put back."""
    kind = torch.device(device).type
    devices = [torch.device(device)] if kind == "cuda" else []

    def states() -> list[Any]:
        there = [torch.cuda.get_rng_state(d) for d in devices]
        return [torch.random.get_rng_state(), *there, random.getstate(), numpy.random.get_state()[1:3]]  # type: ignore[index]

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, tuple):
            return len(a) == len(b) and all(map(equal, a, b))
        return bool((a == b).all()) if isinstance(a, (Tensor, numpy.ndarray)) else bool(a == b)

    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[d.index or 0 for d in devices]):
        before = states()
        try:
            yield lambda: not all(map(equal, before, states()))
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


class _State:
    """Remembers what a function can keep between calls, as far as it can be seen: attributes, containers, closures, globals.

    Args:
        function: The function.
    """

    def __init__(self, function: Any) -> None:
        self._undo: list[Callable[[], None]] = []
        self._same: list[Callable[[], bool]] = []
        self._seen: set[int] = set()
        self.learned: list[Tensor] = []
        self._plain = False
        self._walk(function, 0)

    def changed(self) -> bool:
        """Whether anything is not as it was."""
        return not all(same() for same in self._same)

    def restore(self) -> None:
        """Put containers, attributes, closures and tensors back."""
        for same, undo in zip(self._same, self._undo, strict=True):
            if not same():
                undo()

    def _walk(self, value: Any, depth: int) -> None:
        plain = isinstance(value, (dict, list, set, deque, tuple, numpy.ndarray, Tensor))
        if id(value) in self._seen or depth > DEPTH or (self._plain and not plain):
            return
        self._seen.add(id(value))
        if isinstance(value, MethodType):
            self._walk(value.__self__, depth)
            self._walk(value.__func__, depth)
        elif isinstance(value, FunctionType):
            self._of_function(value, depth)
        elif isinstance(value, Tensor):
            self._of_tensor(value)
        elif isinstance(value, dict):
            self._of_mapping(value, depth)
        elif isinstance(value, numpy.ndarray):
            content = value.copy()
            self._same.append(lambda: numpy.array_equal(value, content))
            self._undo.append(lambda: numpy.copyto(value, content))
        elif isinstance(value, (list, set, deque)):
            self._of_sequence(value, depth)
        elif isinstance(value, tuple):
            for item in value:
                self._walk(item, depth + 1)
        elif isinstance(value, nn.Module):
            self._of_module(value)
        elif not isinstance(value, (type, ModuleType)):
            self._of_object(value, depth)

    def _of_function(self, value: FunctionType, depth: int) -> None:
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            self._same.append(lambda cell=cell, content=content: cell.cell_contents is content)  # type: ignore[misc]
            self._undo.append(lambda cell=cell, content=content: setattr(cell, "cell_contents", content))  # type: ignore[misc]
            self._walk(content, depth + 1)
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            self._walk(default, depth + 1)
        self._of_mapping(vars(value), depth)
        scope = value.__globals__
        for name in value.__code__.co_names:
            if name in scope and not hasattr(scope[name], "__path__") and type(scope[name]).__name__ != "module":
                content = scope[name]
                self._same.append(lambda s=scope, n=name, c=content: s.get(n) is c)  # type: ignore[misc]
                self._undo.append(lambda s=scope, n=name, c=content: s.__setitem__(n, c))  # type: ignore[misc]
                if not callable(content) or isinstance(content, FunctionType):
                    self._walk(content, depth + 1)

    def _of_module(self, value: nn.Module) -> None:
        for module in value.modules():
            self._of_mapping(vars(module), DEPTH)
            for tensors in (own_parameters(module), own_buffers(module)):
                self._of_mapping(tensors, DEPTH)
                for tensor in tensors.values():
                    self._walk(tensor, DEPTH)

    def _of_tensor(self, value: Tensor) -> None:
        if value.requires_grad:
            self.learned.append(value)
        version, content = version_of(value), value.detach().clone() if value.numel() <= 2**16 else None
        self._same.append(lambda: version_of(value) == version)

        def undo() -> None:
            if content is not None:
                with torch.no_grad():
                    value.copy_(content)

        self._undo.append(undo)

    def _of_mapping(self, value: dict[Any, Any], depth: int) -> None:
        before = dict(value)
        self._same.append(
            lambda: value.keys() == before.keys() and all(value[key] is item for key, item in before.items())
        )

        def undo() -> None:
            value.clear()
            value.update(before)

        self._undo.append(undo)
        for item in itertools.islice(before.values(), MOST_ITEMS):
            self._walk(item, depth + 1)

    def _of_sequence(self, value: list[Any] | set[Any] | deque[Any], depth: int) -> None:
        before = list(value)
        self._same.append(
            lambda: len(value) == len(before) and all(a is b for a, b in zip(value, before, strict=True))
        )

        def undo() -> None:
            value.clear()
            value.update(before) if isinstance(value, set) else value.extend(before)

        self._undo.append(undo)
        for item in before[:MOST_ITEMS]:
            self._walk(item, depth + 1)

    def _of_object(self, value: Any, depth: int) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            # Of a Trainer or the like only containers: what its objects hold is no state of the function, and threads
            # of ours change it.
            library = any(kind.__module__.partition(".")[0] in LIBRARIES for kind in type(value).__mro__)
            outer, self._plain = self._plain, self._plain or library
            self._of_mapping(own, depth)
            self._plain = outer
        if callable(value):
            call = next((vars(kind)["__call__"] for kind in type(value).__mro__ if "__call__" in vars(kind)), None)
            if isinstance(call, FunctionType):
                self._of_function(call, depth + 1)
        inner = getattr(value, "func", None)  # of functools.partial
        if inner is not None:
            for part in (inner, getattr(value, "args", ()), getattr(value, "keywords", {})):
                self._walk(part, depth + 1)
