"""Finds out who holds up a job: from the last line of every rank to one summary that names the rank and what it does.

A line is a mapping: `waits` (for other ranks), `text`, `age` in seconds, `awaits` (ranks, None if they are not known), `stack`,
`measured` (whether steps that were measured say how long that may take), `bound` (seconds, as far as this rank measured), `done`
(what it has done so far, in words).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias


Lines: TypeAlias = Mapping[int, Mapping[str, Any]]

STEPS = 10  # longest recent steps that a wait may last
LOOK_S = 2.0  # a line that is older is explained by the stack
UNLIKE = (
    "Code of a loop or a callback does on some ranks only what all must do alike (`if accelerator.is_main_process:`, a number of its "
    "own batch): it skips optimizer.step(), runs the model once more, clips, freezes parameters or makes an optimizer."
)


def blame(lines: Lines, rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Follow who waits for whom, from one rank on.

    Returns:
        The ranks from `rank` to the first that is to blame, each waiting for the next; and all that are to blame: they are
        waited for and wait for nobody. Both without them if the ranks wait for each other.
    """
    came_from, queue, stuck = {rank: rank}, deque([rank]), list[int]()
    while queue:
        here = queue.popleft()
        line = lines.get(here)
        if here != rank and (line is None or not line["waits"]):
            stuck.append(here)
            continue
        awaited = None if line is None else line.get("awaits")
        for other in range(world_size) if awaited is None else awaited:
            if other not in came_from:
                came_from[other] = here
                queue.append(other)
    if not stuck:
        return [], []
    path = [max(stuck, key=lambda each: _weight(lines.get(each)))]
    while path[0] != rank:
        path.insert(0, came_from[path[0]])
    return path, sorted(stuck)


def _weight(line: Mapping[str, Any] | None) -> tuple[bool, float]:
    return (True, 0.0) if line is None else (line.get("silent", False), line["age"])


def agreed_bound(lines: Lines, timeout_s: float) -> float:
    """Seconds that a wait may last, the same on every rank: the largest that any has measured; the time-out if none has."""
    bounds = [line["bound"] for line in lines.values() if line.get("bound") is not None]
    return min(timeout_s, max(bounds, default=timeout_s))


def is_measured(lines: Lines, rank: int, stuck: Sequence[int]) -> bool:
    """Whether everybody who is to blame does what is done in every step; if nobody is, whether all that wait do."""
    ranks = [rank, *stuck] if stuck else list(lines)
    return all(rank in lines and lines[rank].get("measured", False) for rank in ranks)


def moves(lines: Lines, stuck: Sequence[int]) -> bool:
    """Whether somebody who is to blame has begun something else a moment ago: it is slow, for what no stack has explained yet."""
    return any(
        rank in lines and not lines[rank].get("silent", False) and lines[rank]["age"] < LOOK_S for rank in stuck
    )


def report(
    names: Sequence[str],
    rank: int,
    text: str,
    age: float,
    heartbeats: Lines,
    bound: str,
    trouble: str = "",
    *,
    axes: str = "",
) -> str:
    """The message of a hang: who waits, for what, and what every rank was last seen doing.

    Args:
        names: Words for every rank.
        rank: Rank that gives up.
        text: Thing that it waits for.
        age: Seconds that it has waited.
        heartbeats: The last line of each rank that is known.
        bound: The longest wait allowed, in words.
        trouble: Trouble with the store that lines come from; empty without any.
        axes: Axes of the mesh over which it waits, if they are known.
    """
    path, stuck = blame(heartbeats, rank, len(names))
    over = f" (over {axes})" if axes else ""
    lines = [f"hf_parallel: {names[rank]} gave up: {text}{over}, for {age:.1f} s ({bound})."]
    if trouble:
        lines.append(f"{trouble[0].upper()}{trouble[1:]}, so what other ranks do is not known from here.")
    elif stuck:
        lines.append("The job waits for: " + ", ".join(names[each] for each in stuck) + ".")
        lines.append(chain(names, path, heartbeats))
    else:
        lines.append(f"Every rank waits for others: they disagree about what comes next. {UNLIKE}")
        lines += [f"  {names[each]}: {line['done']}" for each, line in sorted(heartbeats.items()) if line.get("done")]
    lines += listed(names, heartbeats, "not known" if trouble else "never seen")
    if trouble:
        lines.append("Look at the network between the machines, and at what the ranks of the other machines say.")
    elif not stuck:
        lines.append(
            "Or replicas read unequal numbers of batches: the shards of a streamed data set may differ in length, where "
            "gradient_accumulation_steps above 1 and evaluations need equal ones. Set dispatch_batches=True of accelerator_config, or "
            "max_steps before the shortest shard ends."
        )
    else:
        lines.append(
            "If that rank is only slow (a long evaluation, a first compilation), raise monitor.hang_timeout_s."
            if "hang_floor_s" not in bound
            else "If that rank is only slow, raise monitor.hang_floor_s."
        )
    return "\n".join(lines)


def chain(names: Sequence[str], path: Sequence[int], lines: Lines) -> str:
    """Say in one sentence who is held up by whom, with the stack of the last."""
    first, *others = path
    text = f"{names[first]} {lines[first]['text']}" if first in lines else names[first]
    for other in others:
        line = lines.get(other)
        doing = "never reported" if line is None else f"{verb(line)} since {line['age']:.1f} s"
        text += f", held up by {names[other]}, which {doing}"
    stack = lines[path[-1]].get("stack") if path[-1] in lines else None
    return f"{text} (stack: {stack})." if stack else f"{text}."


def verb(line: Mapping[str, Any]) -> str:
    """Word what a rank does, to follow its name in a sentence."""
    return f"is {line['text']}" if line.get("silent", False) else str(line["text"])


def listed(names: Sequence[str], lines: Lines, unknown: str) -> list[str]:
    """Lines that say what every rank was last seen doing; ranks that do the same share a line."""
    groups: dict[str, list[int]] = {}
    for rank in range(len(names)):
        groups.setdefault(str(lines[rank]["text"]) if rank in lines else unknown, []).append(rank)
    found = []
    for text, ranks in sorted(groups.items(), key=lambda item: item[1]):
        ages = [lines[rank]["age"] for rank in ranks if rank in lines]
        since = f", since {max(ages):.1f} s" if ages else ""
        found.append(f"  {', '.join(names[rank] for rank in ranks)}: {text}{since}")
    return found
