"""Any `AutoModelForCausalLM`, counted: a sample of the zoo in every run, all of it when there is time.

If these fail, a kind of model is cut wrongly or refused without need, or docs/coverage.md claims what nobody checked.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import zoo
from zoo.models import tiny_config
from zoo.overrides import OVERRIDES, VARIANTS
from zoo.page import totals
from zoo.parts import is_of_this_release, part_of
from zoo.shards import sweep_shards
from zoo.shards_page import MARK
from zoo.sweep import Row, sweep

from hf_parallel.compat.private_transformers import loss_shifts_labels
from hf_parallel.errors import ConfigError
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.model.widths import narrow_configs
from hf_parallel.planner.profile import profile_of


PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
SAMPLE = [
    "bart",
    "bloom",
    "deepseek_v3",
    "gemma3",
    "gemma4_text@kv",
    "glm_moe_dsa@shared",
    "gpt2",
    "llama@tied",
    "mixtral",
    "rwkv@rescale",
    "xlnet",
    "zamba2",
]
REFUSED = {"hrm_text": "run more than once per forward", "reformer": "custom autograd function"}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", SAMPLE)
def test_two_and_three_stages_are_exact_in_training_and_evaluation(name: str) -> None:
    row = sweep(name, (2, 3))
    assert row.verdict == "exact", row.note
    assert {split.evaluation for split in row.splits.values()} == {"exact"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_with_its_reason(name: str) -> None:
    row = sweep(name, (2,))
    assert row.verdict == "refused"
    assert REFUSED[name] in row.note


def shifts(name: str) -> bool:
    """Whether the first label is no target: found by taking it away."""
    model = zoo.build(name)
    inputs = zoo.batch(name, model)
    labels = inputs["labels"].clone()
    labels[:, 0] = -100
    losses = []
    with torch.no_grad():
        for given in (inputs["labels"], labels):
            torch.manual_seed(0)
            losses.append(float(model(**inputs | {"labels": given}).loss))
    return losses[0] == losses[1]


@pytest.mark.parametrize("name", ["bart", "bert", "gpt2", "llama", "prophetnet", "whisper", "xlm", "xlnet"])
def test_targets_are_counted_as_the_loss_counts_them(name: str) -> None:
    assert loss_shifts_labels(zoo.build(name)) == shifts(name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", zoo.entries())
def test_every_entry_is_exact_or_says_why_not(name: str) -> None:
    row = sweep(name)
    assert row.verdict != "failed", row.note
    assert row.verdict == "exact" or row.note
    if row.verdict == "exact":
        assert {split.evaluation for split in row.splits.values()} == {"exact"}
        assert loss_shifts_labels(zoo.build(name)) == shifts(name)


def asked_of_its_config(name: str) -> None:
    """A narrower model, the work of a step, and memory: answers, or errors that say what the config lacks."""
    config = tiny_config(name)
    list(narrow_configs(config))
    for ask in (profile_of, lambda one: shape_of_config(one, None)):
        with contextlib.suppress(ConfigError):
            ask(config)


@pytest.mark.parametrize("name", ["blt", "gemma4_text", "hunyuan_v1_moe", "mamba2"])
def test_configs_of_odd_kinds_answer_what_is_asked(name: str) -> None:
    asked_of_its_config(name)


@pytest.mark.long
def test_every_config_answers_what_is_asked() -> None:
    for name in zoo.entries():
        asked_of_its_config(name)


def test_overrides_are_about_types_that_exist() -> None:
    assert set(OVERRIDES) | {zoo.type_of(name) for name in VARIANTS} <= set(zoo.all_types())


@pytest.mark.skipif(not is_of_this_release(PAGE.read_text()), reason="the page is of another release of transformers")
def test_the_page_lists_every_type_once_and_its_totals_match_its_rows() -> None:
    text = PAGE.read_text()
    lines = re.findall(r"^\| `([^`]+)` \| (\w*) \| (\w+) \| (\w+) \| (\S+) \|", text, flags=re.MULTILINE)
    names = [line[0] for line in lines]
    assert sorted(names) == sorted(zoo.entries())
    assert max(Counter(names).values()) == 1
    rows = []
    for name, class_name, two, four, ranks in lines:
        verdict = "exact" if two == four == "exact" else two
        rows.append(Row(name, class_name, verdict, ranks="exact" if ranks == "exact" else ""))
    for line in totals(rows, zoo.all_types()):
        assert line in text


@pytest.mark.skipif(not is_of_this_release(PAGE.read_text()), reason="the page is of another release of transformers")
def test_the_page_lists_every_entry_as_two_ranks_and_none_failed() -> None:
    part = part_of(PAGE.read_text(), MARK)
    rows = re.findall(r"^\| (\S+) \| (\d) \| (\w+)", part, flags=re.MULTILINE)
    assert sorted(name for name, tp_size, _ in rows if tp_size == "2") == sorted(zoo.entries())
    assert {tp_size for _, tp_size, _ in rows} == {"2", "3", "4"}
    assert {verdict for *_, verdict in rows} <= {"exact", "refused", "unusable"}
    of_types = [verdict for name, tp_size, verdict in rows if tp_size == "2" and name in zoo.all_types()]
    assert f"2 ranks: types: {len(of_types)}. Exact: {of_types.count('exact')} (" in part


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", zoo.entries())
def test_every_entry_is_exact_on_two_tensor_parallel_ranks(name: str) -> None:
    row = sweep_shards(name, 2)
    assert row.verdict in ("exact", "unusable", "refused"), row.note
