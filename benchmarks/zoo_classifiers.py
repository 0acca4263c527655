"""Cut and shard a tiny classifier of every AutoModelForSequenceClassification type: `python benchmarks/zoo_classifiers.py`.

Classifiers of three classes in training mode, as two pipeline stages and as two tensor-parallel ranks in one process, on the
batches that hf_parallel plans them with: loss and every gradient against the whole model. `--only llama bert` prints these
types and leaves the page.

Writes build/reports/zoo-classifiers.json and the table of classifiers in docs/coverage.md; exits with 1 if a type failed.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import asdict
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

from tables import with_tables  # noqa: E402
from zoo.classifiers import TABLE, ClassifierRow, classifier_lines, classifier_types, sweep_classifier  # noqa: E402
from zoo_jobs import PAGE, in_workers, options, versions, write_report  # noqa: E402


def main() -> int:
    """Sweep, print, write the report and the table; returns the exit code."""
    parser = options("Compare classifiers on stages and ranks with one process.", "zoo-classifiers.json", 240)
    parser.add_argument(
        "--only", nargs="+", choices=classifier_types(), metavar="NAME", help="types; all if not given"
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    names, rows = arguments.only or classifier_types(), list[ClassifierRow]()
    for row in in_workers(functools.partial(sweep_classifier, seconds=arguments.timeout), names):
        rows.append(row)
        told = f"pp {row.pp.verdict}, tp {row.tp.verdict} {(row.pp.note or row.tp.note)[:160]}"
        print(f"[{len(rows)}/{len(names)}] {row.name}: {told}", flush=True)
    if not arguments.only:
        write_report(arguments.report, [asdict(row) for row in rows])
        lines = [f"{versions()}.", "", *classifier_lines(rows)]
        arguments.page.write_text(with_tables(arguments.page.read_text(), {TABLE: lines}))
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
