"""The examples beside fine-tuning as people launch them: what they print is what they claim.

If one fails, the first thing that a reader tries is wrong. `examples/README.md` says what each prints.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from launched_examples import ROOT, first_and_last, launch, run

from hf_parallel.settings.recipes import find_recipe


pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.timeout(420)]


def test_a_model_learns_from_a_stream(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    first, last = first_and_last(launch("pretrain_streaming", tmp_path))
    assert last < first - 1.0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 4


def test_a_loop_learns_and_repeats_its_steps_from_its_state(tmp_path: Path) -> None:
    printed = launch("accelerate_loop", tmp_path)
    first, last = first_and_last(printed)
    assert last < first - 1.0
    (again, worst) = re.findall(r"(\d+) steps again from \S+: losses differ by (\S+) at most", printed)[0]
    assert int(again) == 4
    assert float(worst) < 1e-6
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_loop_has_the_losses_of_one_process_and_goes_on_as_one(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("one", "dp2", "tp2")}
    for folder in folders.values():
        folder.mkdir()
    one = first_and_last(launch("accelerate_loop", folders["one"], recipe=None))
    tp2 = first_and_last(launch("accelerate_loop", folders["tp2"], recipe="cpu_tp2"))
    dp2 = first_and_last(launch("accelerate_loop", folders["dp2"], "--batch_size", "4", recipe="cpu_dp2"))
    assert tp2 == pytest.approx(one, abs=1e-4)  # as many digits as are printed
    assert dp2 == pytest.approx(one, abs=1e-4)
    moved = first_and_last(launch("accelerate_loop", folders["dp2"], "--resume", recipe=None))
    assert moved[1] == pytest.approx(one[1], abs=1e-4)


def differences(printed: str, steps: int) -> float:
    """The largest relative difference, of the table and as the last line says."""
    rows = re.findall(r"^ *\d+  ([\d.]+)  ([\d.]+)  ", printed, flags=re.MULTILINE)
    assert len(rows) == steps
    worst = max(abs(float(moved) - float(whole)) / float(whole) for moved, whole in rows)
    assert float(re.findall(r"largest relative difference (\S+)", printed)[0]) == pytest.approx(worst, abs=1e-6)
    return worst


@pytest.mark.slow
def test_a_run_that_moves_between_layouts_has_the_losses_of_one_that_stayed(tmp_path: Path) -> None:
    printed = launch("resume_other_layout", tmp_path, recipe=None)
    assert differences(printed, 12) < 1e-5
    assert all(f"{name}\n" in printed for name in ("cpu_pp2", "cpu_tp2", "one"))


@pytest.mark.slow
def test_a_stream_goes_on_on_replicas_with_half_of_the_rows_each(tmp_path: Path) -> None:
    recipes = ["--recipes", f"{find_recipe('cpu_dp2')}:4", "one", "--steps", "2"]
    assert differences(launch("resume_other_layout", tmp_path, *recipes, recipe=None), 4) < 1e-5


@pytest.mark.slow
def test_schedules_are_simulated_as_the_page_says(tmp_path: Path) -> None:
    printed = launch("compare_schedules", tmp_path, recipe=None)
    page = (ROOT / "docs" / "schedules.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+%) \| ([\d. ]+) \|", page, flags=re.MULTILINE)
    assert len(rows) == 7
    for row in rows:
        assert re.search(r"\s+".join(map(re.escape, row)), printed), row


@pytest.mark.slow
def test_schedules_are_measured_and_give_the_same_losses(tmp_path: Path) -> None:
    printed = launch("compare_schedules", tmp_path, "--run", "naive", "1f1b", "zbv")
    steps = re.findall(r"^(\w+) +([\d.]+) +([\d.]+)% +\d+ ms  [\d. ]+$", printed, flags=re.MULTILINE)
    assert steps == [("naive", "24.0", "50.0"), ("1f1b", "15.0", "20.0"), ("zbv_zero_bubble", "12.5", "4.0")]
    losses = re.findall(r"train loss ([\d.]+) -> ([\d.]+)", printed)
    assert len(losses) == 3
    for loss in losses:
        assert float(loss[1]) < float(loss[0]) - 0.5
        assert float(loss[1]) == pytest.approx(float(losses[0][1]), rel=1e-5)


@pytest.mark.slow
def test_fewer_bytes_are_sent_and_the_losses_stay_near(tmp_path: Path) -> None:
    printed = launch("slow_network", tmp_path, recipe="cpu_dp2")
    rows = re.findall(r"^(\w+) +([\d.]+) +[\d.]+% +[\d.]+   ([\d.]+) -> ([\d.]+)$", printed, flags=re.MULTILINE)
    (exact, int8, local) = ([float(number) for number in numbers] for _, *numbers in rows)
    assert 3.8 < exact[0] / int8[0] < 4.0
    assert int8[0] / local[0] == pytest.approx(8, rel=0.01)
    assert exact[1] == int8[1] == local[1]  # before the first exchange
    assert exact[2] < exact[1] - 1.0
    assert int8[2] == pytest.approx(exact[2], abs=0.01)
    assert local[2] == pytest.approx(exact[2], abs=0.3)


@pytest.mark.slow
def test_the_cells_of_the_notebook_train_on_two_processes(tmp_path: Path) -> None:
    """Its demo: the same cells with DEMO = True, one after another."""
    from peft import PeftConfig
    from safetensors.torch import load_file

    pytest.importorskip("bitsandbytes")
    cells = json.loads((ROOT / "examples" / "notebook_2xt4.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert code.startswith("DEMO = False")
    (tmp_path / "cells.py").write_text(code.replace("DEMO = False", "DEMO = True", 1))
    printed = run([sys.executable, "cells.py"], tmp_path)
    first, last = first_and_last(printed)
    assert last < first - 0.1
    out = tmp_path / "runs" / "notebook_2xt4"
    assert PeftConfig.from_pretrained(str(out)).peft_type == "LORA"
    assert (
        len(load_file(out / "adapter_model.safetensors")) == 4 * 7 * 2
    )  # of both stages: blocks, linear layers, A and B
