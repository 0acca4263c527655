"""Code of users that computes with the weights of a pipeline, of which each rank has those of its own stages.

What is made of one parameter alone, or of those of one block, is right on the stage that has it. A threshold over all of
them is another number on every stage, and noise drawn for one parameter after another is other noise. Both are followed
through the functions of torch that user code calls, and refused when they are about to be written to a parameter.

Numbers are refused when Python reads them: one that was made of several blocks, and those of one block after another, of which
a sum, a count or a log would be that of this stage, and a file that they are written to. What is written before the next block is
read needs no sum.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_parallel.compat.private_torch import (
    arguments_written,
    brings_into_file,
    id_of_storage,
    name_of_op,
    no_torch_function,
)
from hf_parallel.compat.torch_tools import TorchDispatchMode, WeakStorage
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.gradients.shown import SharedGradient
from hf_parallel.guards.weights.state_dicts import PartTensor
from hf_parallel.model.random_streams import default_generator
from hf_parallel.model.tensors import tensors_in


OVERWRITES = ("copy_", "zero_", "fill_")
KEPT = 1024  # numbers that Python has read, and seedings
STATE = 5000  # bytes of a Mersenne twister: counters and 624 words
EMPTY = frozenset[Any]()
NBYTES = Tensor.nbytes.__get__  # type: ignore[attr-defined]
# Read by Python, past the operations of torch.
LEAVING = frozenset({"numpy", "__array__", "tolist", "numel", "nelement"})
OF_NOTHING = re.compile("expect(s|ed) a non-empty")  # torch.stack, torch.cat
# nn.Module and `tie_weights` of transformers, of what stands for a parameter that another stage holds.
TIES = re.compile(r"as parameter '.*' \(torch.nn.Parameter or None|is neither a parameter, buffer, nor extra state")
# nn.Module, where torch.nn.utils.prune makes a parameter of what stands for one.
MADE = re.compile(r"cannot assign '.*' object to parameter '.*' \(torch.nn.Parameter or None required\)")
LIBRARIES = ("torch.", "transformers.", "accelerate.", "peft.", "safetensors.", "hf_parallel.")


@dataclass(frozen=True)
class Origin:
    """Origin of a tensor: the parameters and random numbers that went into it.

    Args:
        blocks: Blocks, or modules outside of them, whose parameters went into it.
        draws: Seedings of random generators whose numbers went into it.
    """

    blocks: frozenset[str] = EMPTY
    draws: frozenset[int] = EMPTY

    def __or__(self, other: Origin) -> Origin:
        return Origin(self.blocks | other.blocks, self.draws | other.draws)

    def __bool__(self) -> bool:
        return bool(self.blocks or self.draws)


NOTHING = Origin()


@dataclass
class Draws:
    """Tells which draws follow the same seeding of a generator."""

    count: int = 0
    written: dict[int, set[str]] = field(default_factory=dict)  # seeding -> parameters that got its numbers
    _now: dict[tuple[str, int], int] = field(default_factory=dict)

    def next(self, generator: torch.Generator | None, device: torch.device) -> int:
        """The number of the seeding that the next draw follows."""
        generator = default_generator(device) if generator is None else generator
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        key = str(generator.device), generator.initial_seed()  # the object is another one in every call
        if key not in self._now or torch.equal(_state(fresh), _state(generator)):
            self.count += 1
            self._now[key] = self.count
        return self._now[key]

    def trim(self) -> None:
        """Forget the oldest."""
        self.written = dict(list(self.written.items())[-KEPT:])
        self._now = dict(list(self._now.items())[-KEPT:])


def _state(generator: torch.Generator) -> Tensor:
    """The part of a generator's state that draws change, without the unused bytes at the end."""
    return generator.get_state()[:STATE]


class OnStages(TorchDispatchMode):
    """Follows what user code makes of this rank's parameters.

    Args:
        parameters: Name -> this rank's parameter.
        pp_size: Number of stages, for messages.
        resting: Whether the model itself runs, in an evaluation that a callback starts.
        everywhere: Names of parameters that all stages hold: numbers of these are the same on all.
        states: Gives what optimizers keep of parameters, by parameter: it counts as these do.
        layers: Names of layers with adapters, which are merged into them: outside of blocks each is one module.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        pp_size: int,
        resting: Callable[[], bool] = lambda: False,
        everywhere: frozenset[str] = EMPTY,
        states: Callable[[], Mapping[Any, Any]] = dict,
        layers: Collection[str] = EMPTY,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters, self._pp_size, self._resting = parameters, pp_size, resting
        self._everywhere, self._states = everywhere, states
        self._layers = [layer for layer in layers if block_of(f"{layer}.weight") == layer]  # outside of blocks
        self._found: dict[int, str] | None = None
        self._kept: list[WeakStorage] = []
        self._origins: dict[int, tuple[WeakStorage, Origin]] = {}
        self._numbers: dict[float, Origin] = {}  # which Python has of tensors
        self._draws = Draws()
        self._runs = False
        self._leaving = _Leaving(self)
        self._read = ""  # the block whose numbers Python has read since the last write to a parameter

    @property
    def modes(self) -> Sequence[object]:
        """Modes that torch's functions go through in user code, the innermost first."""
        return self._leaving, self

    @property
    def _names(self) -> dict[int, str]:
        """Storage -> parameter, looked up when user code first computes with tensors."""
        if self._found is None:
            states = self._states()
            here: list[tuple[str, Tensor]] = []
            for name, parameter in self._parameters.items():
                here += [(name, tensor) for tensor in (parameter, *_moments(states.get(parameter)))]
            self._found = {_storage(tensor): name for name, tensor in here}
            # `p.data = new` gives one back, and the next tensor, made of another block, would get its id.
            self._kept = [WeakStorage(_memory(tensor)) for _, tensor in here if _storage(tensor)]
        return self._found

    def _end(self) -> None:
        """Finish a call of user code: what it assigned (`p.data = new`) counts as written."""
        states = self._states()
        for name, parameter in self._parameters.items() if self._origins else ():
            for tensor in (parameter, *_moments(states.get(parameter))):
                kept = self._origins.get(_storage(tensor))
                if kept is not None:
                    self._write(name, kept[1])
            if type(parameter.grad) is Tensor:  # what a backward pass has put there
                self._write(name, self._origin(parameter.grad))
        self._read = ""
        self._numbers = dict(list(self._numbers.items())[-KEPT:])
        self._draws.trim()
        self._origins = {key: kept for key, kept in self._origins.items() if not kept[0].expired()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._resting():
            return func(*args, **kwargs)
        name = name_of_op(func).partition("::")[2]
        drawn = self._drawn(func, args, kwargs)
        scalars = list(self._scalars(args, kwargs))
        if not drawn and not scalars and not any(map(self._origin, tensors_in((args, kwargs)))):
            return func(*args, **kwargs)  # nothing of the weights
        pairs = list(_pairs(name, func, args, kwargs))
        origins = []
        for written, given in pairs:
            free = name.endswith("_like") or name.startswith(("new_", "empty"))
            origin = NOTHING if free else functools.reduce(Origin.__or__, map(self._origin, given), NOTHING)
            origin |= functools.reduce(Origin.__or__, scalars, drawn)
            for tensor in written:
                self._written(name, tensor, origin, bool(drawn))
            origins.append(origin)
        out = func(*args, **kwargs)
        if func.namespace == "c10d":  # user code has asked the other ranks
            for leaf in tensors_in((args, kwargs)):
                self._origins.pop(_storage(leaf), None)
            return out
        if isinstance(out, (bool, int, float)) and origins[0]:
            self._leave(origins[0], is_truth=isinstance(out, bool))
            if isinstance(out, float) and not out.is_integer():
                self._numbers[out] = origins[0]
        self._note_results(out, origins)
        return out

    def leaves(self, tensor: Tensor) -> None:
        """Python reads all of a tensor, or counts its elements."""
        self._leave(self._origin(tensor), is_truth=False)

    def follow(self, source: Tensor, made: Tensor) -> None:
        """`made` was made of `source` out of sight: tensor-parallel ranks have put it together."""
        origin = self._origin(source)
        if origin:
            self._note(made, origin)

    def _leave(self, origin: Origin, is_truth: bool) -> None:
        """Python gets a number; whether something holds of one block may be asked block by block."""
        if len(origin.blocks) > 1:
            self._refuse_reads(origin.blocks)
        for block in origin.blocks if not is_truth else ():
            if self._read not in ("", block):
                self._refuse_reads({self._read, block})
            self._read = block

    def _scalars(self, args: Any, kwargs: Any) -> Iterator[Origin]:
        """Origins of numbers that Python has read from tensors and passes on unchanged."""
        if self._numbers:
            yield from (
                self._numbers[one] for one in (*args, *kwargs.values()) if type(one) is float and one in self._numbers
            )

    def _note_results(self, out: Any, origins: Sequence[Origin]) -> None:
        results = list(out) if len(origins) > 1 and isinstance(out, (list, tuple)) else [out]
        for result, origin in zip(results, origins, strict=False):
            for leaf in tensors_in(result) if origin else ():
                self._note(leaf, origin | self._origin(leaf))

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Origin:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return NOTHING
        device = next(
            (leaf.device for leaf in tensors_in((args, kwargs))), kwargs.get("device") or torch.device("cpu")
        )
        generator = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)), None)
        return Origin(draws=frozenset([self._draws.next(generator, torch.device(device))]))

    def _origin(self, tensor: Tensor) -> Origin:
        key = _storage(tensor)
        if key in self._names:
            name = self._names[key]
            return NOTHING if name in self._everywhere else Origin(frozenset([self._block_of(name)]))
        return self._origins[key][1] if key in self._origins else NOTHING

    def _block_of(self, name: str) -> str:
        block = block_of(name)
        return next((layer for layer in self._layers if block.startswith(f"{layer}.")), block)

    def _note(self, tensor: Tensor, origin: Origin) -> None:
        key = _storage(tensor)
        if key and key not in self._names:
            self._origins[key] = WeakStorage(tensor.untyped_storage()), origin

    def _written(self, op: str, tensor: Tensor, origin: Origin, drawn: bool) -> None:
        name = tensor.part.name if isinstance(tensor, SharedGradient) else self._names.get(_storage(tensor))
        if name is not None:
            self._write(name, origin)
            return
        whole = type(tensor) is Tensor and tensor.nbytes == tensor.untyped_storage().nbytes()
        before = NOTHING if whole and (drawn or op in OVERWRITES) else self._origin(tensor)
        self._note(tensor, before | origin)

    def _write(self, name: str, origin: Origin) -> None:
        self._read = ""
        if len(origin.blocks) > 1:
            self._refuse_numbers(name, origin.blocks)
        for draw in origin.draws:
            others = self._draws.written.setdefault(draw, set())
            others.add(name)
            if len(others) > 1:
                self._refuse_noise(*sorted(others)[:2])

    def _refuse_numbers(self, name: str, blocks: frozenset[str]) -> NoReturn:
        raise UnsupportedError(
            f"parameter {name} is changed in a callback by numbers made of the parameters of {len(blocks)} blocks or modules (of "
            f"{' and '.join(sorted(blocks)[:2])}, ...) with pp_size={self._pp_size}: a rank has the parameters of its own stages "
            "only, so a threshold, mean or norm over model.parameters() is another one on each stage. Compute it of each parameter or "
            "block by itself, do it to the whole model before training or after it, or set pp_size to 1."
        )

    def _refuse_reads(self, blocks: Collection[str]) -> NoReturn:
        raise UnsupportedError(
            f"numbers of the parameters of several blocks (of {' and '.join(sorted(blocks)[:2])}, ...) are read with "
            f"pp_size={self._pp_size}: a rank has the parameters of its own stages only, so a norm, sum, count or log over "
            "model.parameters() or model.state_dict() would be that of a stage. Take the whole weights from "
            "accelerator.get_state_dict(model), called on every rank, which gives them to rank 0; or model.num_parameters() for the "
            "count; or write to each parameter what you made of it before you read the next; or set pp_size to 1."
        )

    def _refuse_noise(self, first: str, second: str) -> NoReturn:
        raise UnsupportedError(
            f"random numbers that a callback draws one after another are written to {first} and to {second} with "
            f"pp_size={self._pp_size}: each stage draws for its own parameters only, so they would not be those of one process. "
            "Draw for each parameter with a generator seeded by its name and the step (torch.Generator().manual_seed("
            'zlib.crc32(f"{name} {step}".encode()))), or set pp_size to 1.'
        )

    def _of_nothing(self, error: Exception) -> str:
        return (
            f"user code joins an empty list of tensors ({error}) with pp_size={self._pp_size}: a rank has the parameters of its own "
            "stages only, so a list that is chosen by names is empty on the stages that have none of them, and what is made of it "
            "would be another number on each stage. Use torch.nn.utils.clip_grad_norm_(model.parameters(), limit), or do to each "
            "parameter what you made of it, or set pp_size to 1."
        )

    def _ties(self, error: Exception) -> str:
        return (
            f"user code puts one parameter in the place of another ({error}) with pp_size={self._pp_size}: this stage has not both of "
            "them, and optimizer and checkpoints know the weights that were tied when the model was cut. Tie them before that "
            "(model.config.tie_word_embeddings = True and model.tie_weights() before the Trainer is made), or set pp_size to 1."
        )

    @property
    def _of_missing(self) -> str:
        return (
            f"hf_parallel: pp_size={self._pp_size}: each rank runs the blocks of its own stages only, and so do forward hooks. What a "
            "hook on a block of another stage would have kept is not here: have the hook do all the work with what it sees, compute "
            "the loss from the model's outputs, or set pp_size to 1."
        )

    def _made(self, error: Exception) -> str:
        return (
            f"user code makes a new parameter of one that another stage has ({error}) with pp_size={self._pp_size}: optimizer and "
            "checkpoints know the parameters that there were when the model was cut, so a new one would not be trained. Do it "
            "before the Trainer is made, as with torch.nn.utils.prune, or multiply each parameter with a mask after each step."
        )

    def watch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which calls code of users, made to notice what that does."""

        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._runs:  # an event of an evaluation that a callback runs
                return call(*args, **kwargs)
            self._runs = True
            try:
                with self, self._leaving:
                    result = call(*args, **kwargs)
                self._end()
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                for reason, say in ((OF_NOTHING, self._of_nothing), (TIES, self._ties), (MADE, self._made)):
                    if reason.search(str(error)):
                        raise UnsupportedError(say(error)) from error
                raise
            except (LookupError, UnboundLocalError) as error:
                error.add_note(self._of_missing)
                raise
            finally:
                self._runs, self._found, self._kept = False, None, []
            return result

        return called


class _Leaving(TorchFunctionMode):
    """Tells what Python reads past the operations of torch."""

    def __init__(self, stages: OnStages) -> None:
        super().__init__()
        self._stages = stages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts = func == NBYTES or getattr(func, "__name__", "") in LEAVING
        if counts:
            caller = sys._getframe(1).f_globals.get("__name__", "") + "."
            counts = not caller.startswith(LIBRARIES)
        if counts or brings_into_file(func, sys._getframe(1), LIBRARIES):
            self._stages.leaves(args[0])
        return func(*args, **(kwargs or {}))


def block_of(name: str) -> str:
    """The repeated block that a parameter is in, by the first number in its name; else its module."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1])


def _moments(state: Any) -> Iterator[Tensor]:
    """State that an optimizer keeps of one parameter, but for counts of steps, which are the same of all."""
    values = state.values() if isinstance(state, Mapping) else ()
    return (one for one in values if isinstance(one, Tensor) and one.ndim > 0 and one.layout is torch.strided)


def _storage(tensor: Tensor) -> int:
    """Id of the storage of a tensor that has one of its own; 0 for other tensors."""
    if not isinstance(tensor, PartTensor) and type(tensor) not in (Tensor, nn.Parameter):
        return 0
    return id_of_storage(_memory(tensor))


def _memory(tensor: Tensor) -> torch.UntypedStorage:
    with no_torch_function():
        return tensor.untyped_storage()


def _pairs(name: str, func: Any, args: Any, kwargs: Any) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield (tensors written, tensors read) of a call; a pair for each element of the lists of a `_foreach` function."""
    changed = {key for pair in arguments_written(func) for key in pair}
    everything = [*enumerate(args), *kwargs.items()]
    alike = len(args[0]) if name.startswith("_foreach_") else None
    if alike is not None and name.endswith("_"):
        changed.add(0)
    for index in range(1 if alike is None else alike):
        written: list[Tensor] = []
        given: list[Tensor] = []
        for key, value in everything:
            one = (
                value[index]
                if alike is not None and isinstance(value, (list, tuple)) and len(value) == alike
                else value
            )
            (written if key in changed else given).extend(tensors_in([one]))
        yield written, given
