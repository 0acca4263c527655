"""How the planner's constants are fitted on published step times, for `bench_planner`.

Gauss-Newton on the logarithms of predicted over measured, with Huber's weights, each table weighing by the root of its
rows, and a pull to where every fit begins: what other published runs say, so that no held-out table has a say. Bounds are those
of physics: what benchmarks of links, memory and single kernels reach.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from benchmarks.planner_rows import Row, errors
from hf_parallel.planner.constants import Constants


# Where every fit begins and is pulled to, and what it cannot leave. The beginnings, as the constants that are judged, are what
# published runs say that this repository does not carry: arXiv:2311.05610 (its sweeps of layouts), arXiv:2401.10241,
# arXiv:2411.05288, the chronicles of BLOOM, NVIDIA's figures of NeMo, Megatron-Bridge and its DGX Cloud recipes, InternEvo,
# Megatron-LLaMA, fms-fsdp and torchtitan of 2024; some 700 runs on A100 and H100.
BEGIN: Final[Mapping[str, tuple[float, float, float]]] = {
    "e_mm": (0.85, 0.8, 1.0),
    "e_bw": (0.75, 0.7, 0.95),
    "e_att": (0.78, 0.6, 1.0),  # of rows so long that their first keys do not count
    "thin": (8.0, 0.5, 200.0),
    "few": (30.0, 1.0, 1000.0),
    "c_intra": (0.66, 0.6, 0.85),
    "c_inter": (0.75, 0.65, 0.95),
    "congestion": (0.033, 0.01, 0.1),
    "gamma": (0.12, 0.08, 0.2),
    "t_kernel": (3e-5, 5e-6, 6e-5),
    "t_floor": (4e-6, 1e-7, 2e-5),
    "t_call": (1e-4, 1e-5, 3e-4),
    "t_message": (1.9e-5, 5e-6, 1e-4),
    "t_micro": (5e-4, 1e-5, 3e-3),
    "t_step": (1.1e-2, 3e-3, 5e-2),
    "a_inter": (1e-5, 1e-6, 3e-5),
    "p2p": (0.75, 0.5, 2.0),
}
# DeepSpeed of early 2021, whose gathers are four times slower than any later engine's: shown, never fitted or counted.
NOT_FITTED: Final = ("sc21_t2_zero3",)
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "sc21": ("sc21_t1", "sc21_t2_ptd"),
    "korthikanti_t5": ("korthikanti_t5",),
    "mtnlg": ("mtnlg",),
    "llama3_405b": ("llama3_405b",),
    "torchtitan": ("torchtitan", "torchtitan_fp8", "torchtitan_async"),
    "automodel": ("automodel",),
    "mosaic_h100": ("mosaic_h100", "mosaic_h100_large"),
    "mosaic_a100": ("mosaic_a100_80", "mosaic_a100_40"),
    "vtrain_multi": ("vtrain_multi",),
    "vtrain_single": ("vtrain_single",),
}
MOST_ROWS: Final = 48  # of a table in a fit
ROUNDS: Final = 5
PULL: Final = 0.15
HUBER: Final = 0.1
STEP: Final = 0.03  # of a constant's logarithm, for derivatives


def fitted_of(tables: Mapping[str, Sequence[Row]]) -> dict[str, Sequence[Row]]:
    return {name: rows for name, rows in tables.items() if name not in NOT_FITTED}


def fit(tables: Mapping[str, Sequence[Row]], judged: Constants) -> Constants:
    """Constants that fit the tables; those that are judged stay."""
    draw = random.Random(0)
    sets = [rows if len(rows) <= MOST_ROWS else draw.sample(list(rows), MOST_ROWS) for rows in tables.values()]
    problem = _Problem([row for rows in sets for row in rows], _weights(sets), judged)
    found = problem.begin
    left = problem.residuals(found)
    loss, damping = problem.loss(left, found), 1e-3
    for _ in range(ROUNDS):
        slopes = problem.slopes(found, left)
        weights = problem.weights / np.maximum(np.abs(left), HUBER)
        pull = 2 * PULL / len(found)
        square = slopes.T @ (slopes * weights[:, None]) + pull * np.eye(len(found))
        down = slopes.T @ (weights * left) + pull * (found - problem.begin)
        for _ in range(4):
            move = np.clip(-np.linalg.solve(square + damping * np.eye(len(found)), down), -0.7, 0.7)
            other = np.clip(found + move, problem.low, problem.high)
            left_there = problem.residuals(other)
            loss_there = problem.loss(left_there, other)
            if loss_there < loss:
                found, left, loss, damping = other, left_there, loss_there, damping / 3
                break
            damping *= 5
        else:
            break
    return problem.constants(found)


def _weights(sets: Sequence[Sequence[Row]]) -> np.ndarray:
    weights = np.array([len(rows) ** -0.5 for rows in sets for _ in rows])
    return weights / weights.sum()


class _Problem:
    """Residuals of rows as a function of the constants' logarithms."""

    def __init__(self, rows: Sequence[Row], weights: np.ndarray, judged: Constants) -> None:
        self.rows, self.weights, self.judged = rows, weights, judged
        self.begin, self.low, self.high = np.log(np.array(list(BEGIN.values()))).T

    def constants(self, point: np.ndarray) -> Constants:
        return replace(self.judged, **dict(zip(BEGIN, map(float, np.exp(point)), strict=True)))

    def residuals(self, point: np.ndarray) -> np.ndarray:
        return np.array(errors(self.rows, self.constants(point)))

    def loss(self, left: np.ndarray, point: np.ndarray) -> float:
        size = np.abs(left)
        huber = np.where(size < HUBER, size**2 / 2 / HUBER, size - HUBER / 2)
        return float((self.weights * huber).sum() + PULL * ((point - self.begin) ** 2).mean())

    def slopes(self, point: np.ndarray, left: np.ndarray) -> np.ndarray:
        columns = []
        for index in range(len(point)):
            other = point.copy()
            other[index] += STEP if point[index] + STEP <= self.high[index] else -STEP
            columns.append((self.residuals(other) - left) / (other[index] - point[index]))
        return np.stack(columns, axis=1)
