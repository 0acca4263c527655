"""The part of docs/coverage.md about ranks that share rows. The same rows give the same text."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.rows import RowsRow


MARK = "# Shared sequences"
INTRO = f"""{MARK}

The same models on 2 gloo ranks that share the sequence of each row (`sp_size: 2`), compared with the plain model. Auxiliary router
losses are off: they are refused. `make zoo-sp` writes this part of the page; do not edit it.

* *exact*: the start accepts the model, and on batches of 2 x 8 tokens padded right, 3 x 11 padded left and 2 x 13 without a mask the
  loss and every gradient, summed over the ranks, agree to 1e-5 relative in fp32, or to 1e-9 in fp64 where the model itself is too
  badly conditioned for that.
* *refused*: the start refuses it, with the module where the two runs part. *failed*: accepted, and different.
* *packed*: rows of several documents, with positions that begin anew, are exact as well; where not, such batches are refused.
* *ring*: the same with `sp_attention: ring`, tried on the types that are exact with heads exchanged.
"""
HEADER = "| type | verdict | packed | ring | note |"


def rows_totals(rows: Sequence[RowsRow], types: Sequence[str]) -> list[str]:
    """Counts over the types."""
    mine = [row for row in rows if row.name in types]
    counts = {verdict: sum(row.verdict == verdict for row in mine) for verdict in ("exact", "refused", "failed")}
    packed = sum(row.documents for row in mine if row.verdict == "exact")
    exact = [row for row in mine if row.verdict == "exact"]
    ring = {how: sum(row.ring == how for row in exact) for how in ("exact", "refused", "failed", "")}
    return [
        f"Types tried: {len(mine)} of {len(types)}. Exact: {counts['exact']}, {packed} of them with packed rows. Refused with the "
        f"module: {counts['refused']}. Failed: {counts['failed']}. Not trainable from their configuration: "
        f"{len(mine) - sum(counts.values())}.",
        f"As a ring, of the exact ones: {ring['exact']} exact, {ring['refused']} refused, {ring['failed']} failed, {ring['']} not tried.",
    ]


def rows_page(rows: Sequence[RowsRow], types: Sequence[str], versions: str) -> str:
    """The whole part, from its mark on."""
    ordered = sorted(rows, key=lambda row: (row.name not in types, row.name))
    table = ["|" + " | ".join(_cells(row)) + " |" for row in ordered]
    rule = "|" + "---|" * (HEADER.count("|") - 1)
    return "\n".join(
        [INTRO, f"{versions}.", "", *(f"* {line}" for line in rows_totals(rows, types)), "", HEADER, rule, *table, ""]
    )


def _cells(row: RowsRow) -> list[str]:
    verdict = f"{row.verdict} ({row.dtype})" if row.dtype == "fp64" else row.verdict
    note = (row.note or row.ring_note).replace("|", "\\|")
    packed = "yes" if row.documents and row.verdict == "exact" else ""
    return [f" `{row.name}`", verdict, packed, row.ring, note[:300]]
