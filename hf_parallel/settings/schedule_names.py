"""The names of the pipeline schedules, without an import: the command line needs them before anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal


ScheduleName = Literal[
    "1f1b",
    "gpipe",
    "naive",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
    "csv",
    "pipedream",
    "pipedream_2bw",
]
# Schedules that do not drain the pipeline between optimizer steps; they have one stage on each rank.
ASYNCHRONOUS: Final = ("pipedream", "pipedream_2bw")
# Names that the papers use; valid wherever a schedule is named, and shown by the full name.
SHORT_NAMES: Final = {
    "zb": "interleaved_zero_bubble",
    "zbv": "zbv_zero_bubble",
    "interleaved": "interleaved_1f1b",
}
# Stages on each rank: the default, and whether that is the only number that the schedule is made for.
STAGES_PER_RANK: Mapping[str, tuple[int, bool]] = {
    "naive": (1, True),
    "gpipe": (1, True),
    "1f1b": (1, True),
    "interleaved_1f1b": (2, False),
    "interleaved_zero_bubble": (2, False),
    "zbv_zero_bubble": (2, True),
    "dualpipev": (2, True),
}


def full_name(name: object) -> object:
    """A schedule's full name; what is no short name stays as it is."""
    return SHORT_NAMES.get(name, name) if isinstance(name, str) else name
