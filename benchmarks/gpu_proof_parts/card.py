"""The card: what a machine showed, in Markdown, to be posted and collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_proof_parts.machine import Machine
from gpu_proof_parts.runner import Outcome


GB = 1e9


def card(machine: Machine, outcomes: Sequence[Outcome], commit: str, date: str) -> str:
    """The card of a machine."""
    gpus = f"{len(machine.gpus)} x {machine.gpus[0]}, {machine.gpu_bytes / GB:.0f} GB" if machine.gpus else "no GPU"
    versions = machine.versions
    dry = machine.device != "cuda"
    head = f"DRY RUN on {'soft CUDA devices' if machine.device == 'soft' else 'the CPU'}: figures mean nothing"
    lines = [
        f"### {head if dry else gpus}",
        "",
        f"- {date}, hf_parallel at {commit}",
        f"- GPU: {gpus}; driver {machine.driver or 'unknown'}",
        f"- {machine.cores} cores, {machine.ram_bytes / GB:.0f} GB of RAM",
        f"- torch {versions.get('torch')}, CUDA {versions.get('cuda')}, NCCL {'.'.join(map(str, machine.nccl)) or 'none'}",
        f"- transformers {versions.get('transformers')}, accelerate {versions.get('accelerate')}, "
        f"Python {versions.get('python')}",
        "",
        "| step | result | s | figures (median, least .. most of the rounds) |",
        "|:--|:--|--:|:--|",
    ]
    for outcome in outcomes:
        said = _figures(outcome)
        result = outcome.status if outcome.status == "passed" else f"**{outcome.status}**"
        lines.append(f"| {outcome.step} | {result} | {outcome.seconds:.0f} | {said} |")
    failed = [outcome for outcome in outcomes if outcome.status in ("failed", "timed out")]
    for outcome in failed:
        lines += ["", f"{outcome.step}:", "", *(f"    {line}" for line in outcome.reason.splitlines()[:LINES])]
    return "\n".join(lines) + "\n"


LINES = 12  # of a failure


def _figures(outcome: Outcome) -> str:
    """A row's last cell: figures, and the first line of why a step did not pass."""
    reason = (outcome.reason.splitlines() or [""])[0]
    show = SHOWN.get(outcome.step)
    try:
        figures = show(outcome.figures) if show is not None and outcome.figures else ""
    except (KeyError, TypeError, ValueError):
        figures = ""  # a step that failed half way
    return "; ".join(filter(None, [figures, reason])).replace("|", "/")


def _range(values: Mapping[str, float], form: str = ".1f") -> str:
    middle, least, most = (format(values[name], form) for name in ("median", "least", "most"))
    return f"{middle} ({least} .. {most})"


def _tests(found: Mapping[str, Any]) -> str:
    return f"{found['passed']} passed, {len(found['failures'])} failed, {found['skipped']} skipped"


def _cases(found: Mapping[str, Any]) -> str:
    rows = found["cases"].values()
    worst = max((row["parameters"] for row in rows if "parameters" in row), default=None)
    agree = sum(bool(row.get("agrees")) for row in rows)
    backends = "/".join(sorted({row["backend"] for row in rows}))
    shown = "" if worst is None else f", parameters differ by {worst:.1e} at most"
    return f"{agree} of {len(rows)} layouts agree with one process over {backends}{shown}"


def _nccl(found: Mapping[str, Any]) -> str:
    said = [said for rows in found["calls"].values() for said in rows.values()]
    return f"{said.count('ok')} of {len(said)} calls work over {found['backend']}; {_cases(found)}"


def _races(found: Mapping[str, Any]) -> str:
    rows = found["cases"].values()
    races = sum(len(row.get("races", ())) for row in rows)
    return f"{races} unordered accesses in {len(rows)} kinds of runs"


def _memory(found: Mapping[str, Any]) -> str:
    rows = {name: row for name, row in found["runs"].items() if "ratio" in row}
    return "peak / estimate: " + ", ".join(
        f"{name} {row['ratio']:.2f} ({row['peak_bytes'] / GB:.1f} GB)" for name, row in rows.items()
    )


def _offload(found: Mapping[str, Any]) -> str:
    hidden = _range(found["overlap"]["hidden"], ".0%")
    down, up = (_range(found[f"{way}_gb_s"]) for way in ("down", "up"))
    return f"down {down} GB/s, up {up} GB/s, {hidden} of the shorter of copy and products hidden"


def _codecs(found: Mapping[str, Any]) -> str:
    rows = ", ".join(
        f"{name} {row['encode_gb_s']['median']:.0f}/{row['decode_gb_s']['median']:.0f}"
        for name, row in found["codecs"].items()
    )
    return f"copy {_range(found['copy_gb_s'], '.0f')} GB/s; encode/decode GB/s: {rows}"


def _callback(found: Mapping[str, Any]) -> str:
    ratios = found["ratios"]
    steps = found["step_ms"]
    return (
        f"{found['model']}: step {found['ratio']:.3f} ({min(ratios):.3f} .. {max(ratios):.3f}) of stock's "
        f"{steps['stock']:.1f} ms"
    )


def _throughput(found: Mapping[str, Any]) -> str:
    made = []
    for name, row in found["variants"].items():
        if "tokens_s" not in row:
            made.append(f"{name}: {row.get('refused') or row.get('error')}")
            continue
        mfu = f"MFU {row['mfu']:.1%}" if row["mfu"] is not None else "peak of this GPU not known"
        made.append(
            f"{name}: {_range(row['tokens_s'], ',.0f')} tokens/s, {row['tflops_a_gpu']:.0f} TFLOP/s a GPU, {mfu}, "
            f"{row['rows']} x {row['length']} tokens a GPU"
        )
    recomputed = ", blocks recomputed" if found["recomputed"] else ""
    return f"{found['model']}, bf16, {found['attention']}{recomputed}; " + "; ".join(made)


SHOWN: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "tests": _tests,
    "nccl-one-rank": _nccl,
    "nccl-shared-gpu": _cases,
    "parity": _cases,
    "sanitizer": _races,
    "memory": _memory,
    "offload": _offload,
    "codecs": _codecs,
    "callback": _callback,
    "throughput": _throughput,
}
