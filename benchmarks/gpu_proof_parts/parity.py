"""Layouts against one process, on the kernels of this GPU: losses, norms, gradients, parameters after three steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rank_runner import RankError
from trainer_cases import NO_NOISE, Case

from gpu_proof_parts.ranks import Setting, difference, launch, trained


PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 4}
SHORT: dict[str, Any] = {"steps": 4, "arguments": NO_NOISE}


def cases_of(setting: Setting) -> list[tuple[int, Case]]:
    """Ranks and case; on GPUs the model is wide as well as tiny."""
    short = {**SHORT, "device": setting.kind}
    made = []
    for model in ("llama",) if setting.is_tiny else ("llama", "wide"):
        layouts = {
            "pp2": PP2,
            "tp2": {"tp_size": 2},
            "dp2": {},
            "zbv": {**PP2, "schedule": "zbv_zero_bubble"},
        }
        made += [(2, Case(f"{name}_{model}", model=model, parallel=way, **short)) for name, way in layouts.items()]
    made.append((2, Case("zero1_llama", parallel={"zero": {"stage": 1}}, **short)))
    backend = setting.compile_backend
    if backend is not None:
        made.append((2, Case(f"pp2_{backend}_llama", parallel={**PP2, "compile_blocks": backend}, **short)))
    return made


def compared(
    setting: Setting,
    cases: Sequence[tuple[int, Case]],
    backend: str | None = None,
    function: Callable[..., Any] = trained,
    *,
    eager: bool = False,
) -> dict[str, Any]:
    """Each case in a launch of its own, so that one that fails leaves the others; worst differences by case."""
    stock = [dataclasses.replace(case, name=f"stock_{case.name}", parallel=None) for _, case in cases]
    alike = {repr(dataclasses.replace(case, name="")): case for case in stock}
    runs = launch(setting, trained, 1, list(alike.values()), str(setting.folder / "stock"))[0]
    references = dict(zip(alike, runs, strict=True))
    found: dict[str, Any] = {}
    for (world_size, case), reference in zip(cases, stock, strict=True):
        how = backend or setting.backend(world_size)
        folder = str(setting.folder / f"{how}{'_eager' * eager}")
        try:
            mine = launch(setting, function, world_size, [case], folder, backend=how, eager=eager, timeout=90.0)[0][0]
        except RankError as error:
            found[case.name] = {"backend": how, "error": str(error)[-3000:]}
            continue
        worst = difference(mine, references[repr(dataclasses.replace(reference, name=""))])
        found[case.name] = {"backend": how, "agrees": worst.agrees(), **dataclasses.asdict(worst)}
        setting.keep({"cases": found})
    return found


def run(setting: Setting) -> dict[str, Any]:
    """Two ranks, on a GPU each or together on one."""
    return judged(compared(setting, cases_of(setting)))


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Figures of a comparison, with the cases that failed."""
    wrong = [name for name, row in found.items() if not row.get("agrees")]
    reasons = [f"{name}: {_short(found[name])}" for name in wrong]
    return {"cases": found, **({"failed": "\n".join(reasons)} if wrong else {})}


def _short(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"].strip().splitlines()[-1])
    return ", ".join(f"{key} differ by {row[key]:.1e}" for key in ("logs", "gradients", "parameters"))
