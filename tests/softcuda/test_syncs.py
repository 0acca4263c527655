"""How often the host waits for the device inside a training step; each wait is named, and no other may come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks

from softcuda.syncs import EARLIER


# By layout: its settings, how often a step may wait in hf_parallel once the first steps, which look at more, are over, and how often
# for what the step before has left on its way. A pipeline reads what its ranks compare when a backward pass has ended: three numbers
# in a row. Tensor parallelism reads what the ranks compared before the forward pass. The norms of the two parts of
# gradients on the host come from there, and the factor of clipping goes back. Of the step before: whether buffers changed,
# what replicas have compared beside their gradients or with the norm, and the backwards of a model copy.
LAYOUTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "dp2": ({}, 0, 2),
    "zero1": ({"zero": {"stage": 1}}, 0, 2),
    "zero2": ({"zero": {"stage": 2}}, 0, 2),
    "zero1_offloaded": ({"zero": {"stage": 1, "offload_optimizer": "cpu"}}, 3, 2),
    "pp2": ({"pp_size": 2, "num_microbatches": 2}, 3, 0),
    "tp2": ({"tp_size": 2}, 1, 1),
}
# Waits that a layout cannot do without: gloo sends host memory, and an optimizer on the host needs the gradients there.
NEEDED = ("pipeline_parallel/run/transport.py", "data_parallel/host.py")

pytestmark = [pytest.mark.softcuda, pytest.mark.timeout(300)]


def steps(rank: int, world_size: int, layout: str) -> list[list[str]]:
    """Where the host waited in each of eight steps of a loop that reads nothing."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin
    from softcuda.syncs import HostSyncs

    syncs, accelerator = (
        HostSyncs(),
        Accelerator(parallelism_config=HFParallelPlugin({}, **LAYOUTS[layout][0], monitor={"batch_check_steps": 2})),
    )
    model = tiny.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    ids = torch.randint(1, tiny.VOCAB, (4, 16), generator=torch.Generator().manual_seed(0)).to(accelerator.device)
    found = []
    for _ in range(8):
        with syncs.counting() as places:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(places)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_waits_for_the_device_no_more_than_is_known(layout: str, tmp_path: Path) -> None:
    for found in run_ranks(steps, 2, layout, tmp_path=tmp_path, timeout=100):
        for places in found[6:]:
            own = [place for place in places if "hf_parallel/" in place or place.startswith("hf_parallel")]
            waits = [place for place in own if not any(name in place for name in NEEDED)]
            now = [place for place in waits if not place.startswith(EARLIER)]
            assert len(now) <= LAYOUTS[layout][1], "\n".join(now)
            assert len(waits) - len(now) <= LAYOUTS[layout][2], "\n".join(waits)


def test_changes_of_parts_are_judged_when_the_next_step_comes() -> None:
    from hf_parallel.engine.gradients.changed_parts import ChangedParts
    from hf_parallel.errors import UnsupportedError
    from softcuda.syncs import HostSyncs

    gradient = torch.ones(4, device="cuda")
    parts = ChangedParts(lambda: gradient.double().square().sum(), 2)
    with HostSyncs().counting() as places:
        parts.remember()
        gradient.mul_(2)
        parts.refuse_changes()
    assert places == []
    parts.remember()
    with pytest.raises(UnsupportedError, match="gradients were changed"):
        parts.refuse_changes()
