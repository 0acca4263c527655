"""`model.generate()` of a model that several ranks hold: all of them call it.

Those of one model copy draw the same numbers and get the same tokens; replicas that share out parameters go on until the last
has finished.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_parallel.compat.private_peft import base_model
from hf_parallel.compat.private_transformers import CACHES
from hf_parallel.engine.run.engine import Engine
from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.errors import UnsupportedError
from hf_parallel.model.random_streams import generators_of


logger = logging.getLogger(__name__)

# Ways to generate that read a key-value cache, which stages do not keep.
NEED_A_CACHE = ("assistant_model", *CACHES, "prompt_lookup_num_tokens")
ADVICE = "Take it out of `if state.is_world_process_zero:`, and print on one rank."


def install_generate(engine: Engine) -> None:
    """Replace the instance's `generate`, where the ranks of a model copy must call it together.

    A model with adapters generates with the model that they were put on, whose method is replaced then.
    """
    base = base_model(engine.model)
    own: Callable[..., Any] | None = getattr(base, "generate", None)
    shares_parameters = engine.gradients.replicas.sharded is not None
    meets_replicas = shares_parameters or engine.mesh.shape.ep_size > 1
    if own is None or (engine.mesh.shape.mp_size == 1 and not meets_replicas):
        return

    @functools.wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if engine.mesh.shape.mp_size > 1:
            engine.gathers.meet("model.generate()", ADVICE)
            _share_random_state(engine)
        if meets_replicas:  # transformers knows of its own wrappers only
            kwargs["synced_gpus"] = True
        with contextlib.ExitStack() as stack:
            if isinstance(engine, PipelineEngine):
                kwargs = _without_cache(engine, kwargs)
                stack.enter_context(engine.outputs.predicting(loss_only=False, needs_logits=True, ignored=()))
            if base is not engine.model and (shares_parameters or isinstance(engine, PipelineEngine)):
                stack.enter_context(_routed(engine, base))
            return own(*args, **kwargs)

    vars(base)["generate"] = generate


def _share_random_state(engine: Engine) -> None:
    """Give all ranks of a model copy the random state of their first one, to sample alike; collective over them.

    Each would go on with tokens of its own otherwise, and the next forward pass would mix them.
    """
    mesh, device = engine.mesh, engine.attachment.device
    first = mesh.shape.rank_at(mesh.dp_rank, 0, 0)
    with engine.attachment.watchdog.waiting("waits for the random state that the other ranks generate with"):
        for generator in generators_of(engine.model):
            state = generator.get_state().to(device)  # u8[bytes]
            dist.broadcast(state, src=first, group=mesh.mp_group)
            generator.set_state(state.cpu())


def _without_cache(engine: PipelineEngine, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a `generate` that computes every position anew for each token.

    Raises:
        UnsupportedError: An argument needs a cache.
    """
    given = [name for name in NEED_A_CACHE if kwargs.get(name) is not None]
    if given:
        raise UnsupportedError(
            f"model.generate({', '.join(given)}) with pp_size={engine.mesh.shape.pp_size}: stages keep no key-value cache. "
            f"Leave {' and '.join(given)} out, or save the model with trainer.save_model() and load it in one process."
        )
    _say_once(engine)
    return {**kwargs, "use_cache": False}


def _say_once(engine: PipelineEngine) -> None:
    if engine.mesh.rank == 0 and not engine.generated:
        logger.info(
            "hf_parallel: model.generate() with pp_size=%d works without a key-value cache: each token costs a forward pass over "
            "the whole sequence.",
            engine.mesh.shape.pp_size,
        )
    engine.generated = True


@contextlib.contextmanager
def _routed(engine: Engine, base: nn.Module) -> Iterator[None]:
    """Inside, a base that adapters were put on calls the model with them, which runs stages and gathers parameters."""
    own, before, inside = base.forward, vars(base).get("forward"), False

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return own(*args, **kwargs)
        inside = True
        try:
            return engine.model(*args, **kwargs)
        finally:
            inside = False

    # As in one process, where PEFT generates without what wraps the forward of the model with adapters.
    autocast, engine.autocast = engine.autocast, contextlib.nullcontext
    vars(base)["forward"] = forward
    try:
        yield
    finally:
        engine.autocast = autocast
        if before is None:
            del vars(base)["forward"]
        else:
            vars(base)["forward"] = before
