"""Private names of accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_parallel.errors import UnsupportedError


if TYPE_CHECKING:
    pass


def connect_deepspeed_by_gloo() -> None:
    """Let accelerate connect CPU processes for DeepSpeed; it has no backend for them and would count one process.

    The stock way is `TrainingArguments(ddp_backend="gloo")`, which every user would have to know.

    Raises:
        UnsupportedError: This accelerate chooses its backend elsewhere.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    name = "_prepare_backend"
    stock = vars(PartialState).get(name)
    if stock is None:
        import accelerate

        raise UnsupportedError(
            f"accelerate {accelerate.__version__} does not choose a backend in PartialState.{name}: DeepSpeed cannot connect CPU "
            "processes. Install accelerate>=1.15,<2, or set zero.engine to auto."
        )
    if getattr(stock, "for_deepspeed", False):
        return

    def prepare(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        if cpu or sagemaker_dp:
            return stock(self, cpu, sagemaker_dp, backend)
        return backend or "gloo", DistributedType.NO

    prepare.for_deepspeed = True  # type: ignore[attr-defined]
    setattr(PartialState, name, prepare)
