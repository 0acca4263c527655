"""torch.cuda._sanitizer over training steps: accesses of two streams to one tensor that nothing orders."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from rank_runner import RankError
from trainer_cases import Case, run_case

from gpu_proof_parts.ranks import Setting, launch


PP2 = {"pp_size": 2, "num_microbatches": 2}
RECOMPUTED = {"activation_checkpointing": {"every": 1, "offload": True}}
CASES = {
    "pp2": PP2,
    "pp2, inputs of blocks offloaded": {**PP2, **RECOMPUTED},
    "dp2, compressed": {"gradient_compression": {"method": "int8"}},
    "dp2, optimizer offloaded": {"zero": {"stage": 1, "offload_optimizer": "cpu"}},
    "dp2, parameters gathered late": {"zero": {"stage": 1, "overlap_gather": True}},
}
MOST = 5  # races of a rank that are kept


def watched(rank: int, world_size: int, case: Case, folder: str, soft: bool) -> list[str]:
    """Races of a training run."""
    if soft:
        from softcuda.races import watching

        with watching() as found:
            run_case(case, Path(folder), world_size)
        return found[:MOST]
    from torch.cuda import _sanitizer

    seen: list[str] = []
    stock = _sanitizer.EventHandler._handle_kernel_launch

    def note(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        seen.extend(map(str, itertools.islice(stock(self, *args, **kwargs), MOST - min(MOST, len(seen)))))
        return []  # it would end the run at the first

    _sanitizer.EventHandler._handle_kernel_launch = note  # type: ignore[method-assign, assignment]
    _sanitizer.enable_cuda_sanitizer()
    try:
        run_case(case, Path(folder), world_size)
    finally:
        _sanitizer.cuda_sanitizer.disable()
    return seen


def run(setting: Setting) -> dict[str, Any]:
    """Two steps of each case, in a launch of its own."""
    found: dict[str, Any] = {}
    for number, (name, parallel) in enumerate(CASES.items()):
        case = Case(name, parallel=parallel, device="cuda", steps=2)
        folder = str(setting.folder / str(number))
        soft = setting.device == "soft"
        try:
            races = launch(setting, watched, 2, case, folder, soft, backend=setting.backend(2), timeout=85.0)
        except RankError as error:
            found[name] = {"error": str(error)[-3000:]}
            continue
        found[name] = {"races": [race for of_rank in races for race in of_rank]}
        setting.keep({"cases": found})
    wrong = [name for name, row in found.items() if row.get("error") or row.get("races")]
    reasons = [f"{name}: {found[name].get('error') or found[name]['races'][0]}" for name in wrong]
    return {"cases": found, **({"failed": "\n".join(reasons)} if wrong else {})}
