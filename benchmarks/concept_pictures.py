"""Draw the pictures of the concept pages: boxes and arrows, as SVG.

    python benchmarks/concept_pictures.py     # writes docs/pictures/*.svg

Every picture is a function that fills a board. What a picture claims about numbers comes from the code that computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl


mpl.use("Agg")
mpl.rcParams |= {"svg.hashsalt": "hf_parallel", "svg.fonttype": "none", "font.family": "sans-serif"}

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402


FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
BLUE, ORANGE, GREEN, RED, GREY = "#cfe2f8", "#fbdcb8", "#cdeccd", "#f6cccc", "#e6e6e6"
INK = "#222222"


class Board:
    """A sheet that boxes, arrows and words are put on, in units of about a character's width."""

    def __init__(self, width: float, height: float) -> None:
        self.figure, self.axes = plt.subplots(figsize=(width / 10, height / 10))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)
        self.axes.axis("off")
        self.figure.subplots_adjust(0, 0, 1, 1)

    def box(self, place: tuple[float, float, float, float], text: str, colour: str = BLUE, size: float = 8) -> None:
        """A filled box (left, top, width, height) with words in its middle."""
        left, top, width, height = place
        style = "round,pad=0,rounding_size=0.6"
        self.axes.add_patch(
            FancyBboxPatch((left, top), width, height, style, facecolor=colour, edgecolor=INK, linewidth=0.7)
        )
        self.axes.text(left + width / 2, top + height / 2, text, ha="center", va="center", fontsize=size, color=INK)

    def frame(self, place: tuple[float, float, float, float], text: str) -> None:
        """A dashed frame with words above its left corner."""
        left, top, width, height = place
        style = "round,pad=0,rounding_size=0.6"
        self.axes.add_patch(
            FancyBboxPatch(
                (left, top), width, height, style, facecolor="none", edgecolor=INK, linewidth=0.8, linestyle="--"
            )
        )
        self.words((left, top - 1.1), text)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], text: str = "", colour: str = INK, **given: Any
    ) -> None:
        """An arrow, with words beside its middle."""
        style = {
            "arrowstyle": given.get("style", "->"),
            "color": colour,
            "linewidth": 1.0,
            "linestyle": given.get("line", "-"),
        }
        style |= {"connectionstyle": f"arc3,rad={given.get('bend', 0)}", "shrinkA": 1, "shrinkB": 1}
        self.axes.annotate("", xy=end, xytext=start, arrowprops=style)
        if text:
            x, y = (start[0] + end[0]) / 2 + given.get("dx", 0), (start[1] + end[1]) / 2 + given.get("dy", -1.1)
            self.words((x, y), text, colour=colour, align="center")

    def words(
        self, place: tuple[float, float], text: str, *, align: str = "left", size: float = 8, colour: str = INK
    ) -> None:
        """Words alone."""
        self.axes.text(*place, text, ha=align, va="center", fontsize=size, color=colour)

    def save(self, path: Path) -> None:
        """Write the picture."""
        self.figure.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(self.figure)


def mesh() -> Board:
    """Eight ranks as dp 2 x pp 2 x tp 2."""
    board = Board(76, 27)
    for copy in range(2):
        board.frame((1 + 38 * copy, 4, 36, 21), f"replica {copy}: its own rows")
        for stage in range(2):
            top = 6 + 10 * stage
            for shard in range(2):
                rank = 4 * copy + 2 * stage + shard
                board.box(
                    (3 + 38 * copy + 18 * shard, top, 14, 5),
                    f"rank {rank}\nstage {stage}, shard {shard}",
                    BLUE if stage == 0 else GREEN,
                )
            board.arrow((17 + 38 * copy, top + 2.5), (21 + 38 * copy, top + 2.5), "tp", style="<->")
        board.arrow((10 + 38 * copy, 11), (10 + 38 * copy, 16), "pp", dx=2, dy=0, style="<->")
        board.arrow((28 + 38 * copy, 11), (28 + 38 * copy, 16), "pp", dx=2, dy=0, style="<->")
    board.arrow((35, 22.5), (41, 22.5), "dp", style="<->", dy=-1.2)
    board.words(
        (38, 26),
        "tp: several messages a block, neighbouring ranks. pp: one message a microbatch and cut. dp: gradients, once a step.",
        align="center",
        size=7.5,
    )
    return board


def stages() -> Board:
    """A stack of blocks, cut into two stages."""
    board = Board(84, 22)
    names = ["embedding", *(f"block {i}" for i in range(6)), "norm, head"]
    for rank, (first, last) in enumerate(((0, 5), (5, 8))):
        left = 2 + 10 * first + (2 if rank else 0)
        board.frame((left - 1, 4, 10 * (last - first), 9), f"rank {rank}: stage {rank}")
        for place, name in enumerate(names[first:last]):
            board.box(
                (left + 10 * place, 6, 8, 5), name, GREY if "block" not in name else (BLUE if rank == 0 else GREEN), 7
            )
    board.arrow((50, 7.5), (54, 7.5))
    board.arrow((54, 9.8), (50, 9.8), colour="#b03030")
    board.words(
        (52, 15.5),
        "forward: the tensors that cross the boundary\n(hidden states; whatever else later blocks read)",
        align="center",
        size=7.5,
    )
    board.words((52, 19.5), "backward: their gradients", align="center", size=7.5, colour="#b03030")
    board.words(
        (2, 15.5), "the cut balances measured compute:\nthe head counts, so stage 1 has fewer blocks", size=7.5
    )
    return board


def tensor() -> Board:
    """A column-row pair on two ranks."""
    board = Board(88, 27)
    for rank in range(2):
        top = 4 + 12 * rank
        board.frame((1, top, 74, 8), f"rank {rank}")
        board.box((3, top + 2, 10, 4), "x, whole", GREY)
        board.arrow((13, top + 4), (19, top + 4))
        board.box((19, top + 1.5, 14, 5), f"column layer\noutputs: half {rank}", BLUE)
        board.arrow((33, top + 4), (39, top + 4))
        board.box((39, top + 2, 12, 4), "activation", GREY)
        board.arrow((51, top + 4), (57, top + 4))
        board.box((57, top + 1.5, 14, 5), f"row layer\ninputs: half {rank}", ORANGE)
        board.arrow((71, top + 4), (80, 13 + 2 * rank), bend=0)
    board.box((79, 10.5, 8, 7), "sum\n(all-\nreduce)", RED)
    board.words(
        (44, 26),
        "forward: one all-reduce after the row layer. backward: one of the gradient of x, before the column layers.",
        align="center",
        size=7.5,
    )
    return board


def zero() -> Board:
    """What each of four replicas keeps, in bytes a parameter, with Adam in fp32."""
    board = Board(86, 30)
    parts = (("weights", 4, BLUE), ("gradients", 4, ORANGE), ("optimizer", 8, GREEN))
    for stage in range(4):
        top = 3 + 6.5 * stage
        left, total = 14.0, 0.0
        board.words((1, top + 2), f"zero.stage {stage}", size=8)
        for place, (name, size, colour) in enumerate(parts):
            kept = size / 4 if stage >= 3 - place else size
            width = 3.6 * kept
            board.box((left, top, width, 4), f"{name} {kept:g}" if width > 10 else f"{kept:g}", colour, 7)
            left, total = left + width, total + kept
        board.words((left + 1, top + 2), f"= {total:g} bytes a parameter", size=7.5)
    board.words(
        (1, 29),
        "One of four replicas that train in fp32 with Adam.",
        size=7.5,
    )
    return board


def _there_and_back(
    columns: tuple[tuple[float, float], ...],
    ranks: tuple[tuple[str, str, str, str], ...],
    ways: tuple[str, str],
    note: str,
) -> Board:
    """Two ranks that exchange what they have, work, and exchange it back.

    Args:
        columns: Left and width of the three boxes of a rank.
        ranks: Name of a rank, and the words in its boxes.
        ways: What the two exchanges are called.
        note: Below.
    """
    board = Board(88, 27)
    edges = [(left + width, after) for (left, width), (after, _) in pairwise(columns)]
    for rank, (name, *texts) in enumerate(ranks):
        top = 4 + 12 * rank
        board.frame((1, top, 86, 8), name)
        for (left, width), text, colour in zip(columns, texts, (BLUE, ORANGE, BLUE), strict=True):
            board.box((left, top + 1.5, width, 5), text, colour)
        for start, end in edges:
            board.arrow((start, top + 4), (end, top + 4))
            board.arrow((start, top + 4), (end, 20 - 12 * rank), line=":")
    for (start, end), way in zip(edges, ways, strict=True):
        board.words(((start + end) / 2, 2), way, align="center")
    board.words((44, 26), note, align="center", size=7.5)
    return board


def ulysses() -> Board:
    """All-to-all around attention on two ranks."""
    parts = (("tokens 0 to 3", "heads 0, 1"), ("tokens 4 to 7", "heads 2, 3"))
    ranks = tuple(
        (
            f"rank {rank}",
            f"{tokens}, all heads\nq, k, v",
            f"all tokens, {heads}\nattention",
            f"{tokens}, all heads\nMLP, norms",
        )
        for rank, (tokens, heads) in enumerate(parts)
    )
    note = "Weights are the same on both ranks; activations of a rank are those of its tokens. Dotted: what travels."
    return _there_and_back(((3, 19), (35, 19), (67, 18)), ranks, ("all-to-all", "all-to-all"), note)


def ring() -> Board:
    """Which keys each of four ranks has while it keeps its queries, and which it skips under a causal mask."""
    board = Board(88, 27)
    for hop in range(4):
        board.words((31 + 16 * hop, 2), "own keys" if hop == 0 else f"hop {hop}", align="center")
    for rank in range(4):
        top = 3.5 + 5.5 * rank
        board.box((1, top, 20, 4), f"rank {rank}\nqueries of part {rank}", BLUE, 7)
        for hop in range(4):
            part = rank - hop
            text = f"keys, values {part}" if part >= 0 else "not sent"
            board.box((24 + 16 * hop, top, 14, 4), text, ORANGE if part >= 0 else GREY, 7)
            if part >= 0 and hop < 3 - part:
                board.arrow((38 + 16 * hop, top + 2), (40 + 16 * hop, top + 7), line=":")
    note = "Causal mask: keys go on to the ranks behind (dotted), while the block at hand is computed."
    board.words((44, 26.2), note, align="center", size=7.5)
    return board


def experts() -> Board:
    """Tokens travel to the rank that holds their expert."""
    ranks = tuple(
        (
            f"rank {rank} = replica {rank}",
            f"rows of batch {rank}\nattention, router (whole)",
            f"experts {2 * rank} and {2 * rank + 1}\nof 4",
            f"rows of batch {rank}\nweighted sum",
        )
        for rank in range(2)
    )
    note = "A token goes to the ranks of the experts that its router chose, and its results come back (dotted: between ranks)."
    return _there_and_back(((3, 20), (36, 18), (67, 18)), ranks, ("to the expert", "back"), note)


def recompute() -> Board:
    """What the forward pass keeps of four blocks."""
    board = Board(88, 27)
    rows = (
        ("no checkpointing", ["iaia", "iaia", "iaia", "iaia"]),
        ("block, every: 1", ["i   ", "i   ", "i   ", "i   "]),
        ("block, every: 2", ["i   ", "    ", "i   ", "    "]),
        ("alternate, every: 2", ["i   ", "iaia", "i   ", "iaia"]),
        ("selective, every: 1", ["ia a", "ia a", "ia a", "ia a"]),
    )
    for place, (name, kept) in enumerate(rows):
        top = 2 + 4.4 * place
        board.words((1, top + 1.5), name)
        for index, found in enumerate(kept):
            left = 20 + 17 * index
            board.box((left, top, 15, 3), "", "#ffffff")
            for slot, what in enumerate(found):
                if what != " ":
                    board.box((left + 0.6 + 3.55 * slot, top + 0.5, 3, 2), "", BLUE if slot == 0 else ORANGE)
    board.box((20, 24.4, 2, 1.6), "", BLUE)
    board.words((22.6, 25.2), "input of a block, kept", size=7.5)
    board.box((43, 24.4, 2, 1.6), "", ORANGE)
    board.words((45.6, 25.2), "other activations, kept; what is white is computed again", size=7.5)
    return board


def compression() -> Board:
    """The way of a gradient with error feedback."""
    board = Board(92, 20)
    board.box((1, 4, 12, 6), "gradient\nof this step", BLUE)
    board.box((20, 4, 9, 6), "add", GREY)
    board.box((36, 4, 13, 6), "encode\nint4, top-k, ...", ORANGE)
    board.box((58, 4, 12, 6), "decode,\naverage", GREY)
    board.box((78, 4, 13, 6), "gradient of\nthe optimizer", BLUE)
    board.box((36, 13.5, 13, 5), "error: what the\nencoding lost", RED, 7)
    for start, end in ((13, 20), (29, 36), (70, 78)):
        board.arrow((start, 7), (end, 7))
    board.arrow((49, 7), (58, 7), "few bytes\nto the others", dy=-3)
    board.arrow((42.5, 10), (42.5, 13.5))
    board.arrow((36, 16), (24.5, 10), "next step", dx=-3, dy=1.8)
    return board


def checkpoint() -> Board:
    """A folder that two layouts share."""
    board = Board(88, 28)
    board.frame((1, 4, 22, 20), "saved by pp 2 x dp 2")
    for rank in range(4):
        board.box(
            (3, 5.5 + 4.5 * rank, 18, 3.6), f"rank {rank}: stage {rank % 2}", BLUE if rank % 2 == 0 else GREEN, 7
        )
    board.frame((33, 4, 25, 20), "checkpoint-100")
    lines = (
        "model.safetensors\n(names of the whole model)",
        "training_state/\n(boxes of whole tensors)",
        "manifest.json, last\n(lengths and SHA-256)",
    )
    for place, text in enumerate(lines):
        board.box((35, 5.5 + 6 * place, 21, 5), text, GREY, 7)
    board.frame((68, 4, 19, 20), "resumed by tp 2")
    for rank in range(2):
        board.box((70, 7 + 8 * rank, 15, 5), f"rank {rank}: shard {rank}", ORANGE, 7)
    board.arrow((23, 14), (33, 14), "own parts")
    board.arrow((58, 14), (68, 14), "own boxes")
    board.words(
        (44, 26.5),
        "A folder without a whole manifest is not a checkpoint: after a crash the newest complete one counts.",
        align="center",
        size=7.5,
    )
    return board


PICTURES: dict[str, Callable[[], Board]] = {
    "mesh": mesh,
    "stages": stages,
    "tensor_parallel": tensor,
    "zero": zero,
    "ulysses": ulysses,
    "ring": ring,
    "experts": experts,
    "activation_checkpointing": recompute,
    "compression": compression,
    "checkpoints": checkpoint,
}


def main() -> None:
    """Draw all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw().save(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
