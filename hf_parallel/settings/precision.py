"""Facts about a run's precision that are known before it starts."""

from __future__ import annotations


def fp16_on_cpu(
    precision: object, *, on_cpu: bool, asked: str, fix: str = "Set mixed_precision to bf16 or 'no'."
) -> list[str]:
    """The problem of fp16 on a CPU, if that was asked for: neither accelerate nor DeepSpeed has it there.

    Args:
        precision: The one asked for; 'fp16' in any case of letters.
        on_cpu: Whether the processes train on the CPU.
        asked: Beginning of the message: where and how fp16 is asked for.
        fix: Thing to do instead.
    """
    if not on_cpu or str(precision).lower() != "fp16":
        return []
    return [f"{asked}: fp16 needs a GPU. {fix}"]
