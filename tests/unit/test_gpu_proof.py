"""If these fail, `make gpu-proof` loses a step's result, hangs with it, or does not say why it was left out. No GPU, no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_proof_parts import machine, wheels  # noqa: E402
from gpu_proof_parts.card import card  # noqa: E402
from gpu_proof_parts.machine import GB, Machine  # noqa: E402
from gpu_proof_parts.runner import Step, UnknownStepError, chosen, latest, run_steps  # noqa: E402
from gpu_proof_parts.steps import KINDS, steps_of  # noqa: E402


H100 = Machine(
    "cuda",
    ("NVIDIA H100 80GB HBM3",),
    int(80 * GB),
    int(78 * GB),
    {"torch": "2.11.0", "cuda": "13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "python": "3.12.3"},
    (2, 28, 9),
    "580.1",
    True,
)
WRITES = "import json, sys; json.dump({figures}, open(sys.argv[1], 'w')); {then}"


def step(name: str, figures: str = "{}", then: str = "", **options: object) -> Step:
    command = [sys.executable, "-S", "-c", WRITES.format(figures=figures, then=then)]
    return Step(name, "", command, **options)  # type: ignore[arg-type]


def fakes(mark: Path) -> list[Step]:
    """A step of every kind; the hanging one has started another process, which ignores being asked to end."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = f"import subprocess, time; p = subprocess.Popen([sys.executable, '-S', '-c', {deaf!r}])"
    hanging = f"{child}; open({str(mark)!r}, 'w').write(str(p.pid)); print('hangs', flush=True); time.sleep(600)"
    return [
        step("fine", "{'gb_s': 3}"),
        step("wrong", "{'failed': 'pp2 differs'}", "sys.exit(1)"),
        step("crashing", then="raise RuntimeError('out of memory')"),
        step("hanging", then=hanging, limit_s=1.5),
        step("left-out", needs=(machine.nccl_for_shared_gpus, machine.several_gpus)),
        step("last", "{'env': 'set'}", "assert __import__('os').environ['OF_STEP'] == '1'", env={"OF_STEP": "1"}),
    ]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_step_leaves_a_line_whatever_becomes_of_it(tmp_path: Path) -> None:
    steps, lines, said = fakes(tmp_path / "pid"), tmp_path / "reports" / "proof.jsonl", list[str]()
    outcomes = run_steps(steps, H100, H100.label, lines, said.append)
    assert [outcome.status for outcome in outcomes] == [
        *("passed", "failed", "failed", "timed out", "skipped", "passed")
    ]
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["step"] for row in rows] == [one.name for one in steps]
    assert rows[0]["figures"] == {"gb_s": 3}
    assert rows[1]["reason"] == "pp2 differs"
    assert "RuntimeError: out of memory" in rows[2]["reason"]
    assert rows[3]["reason"] == "killed after 1.5 s\nhangs"
    assert rows[4]["reason"].startswith("needs NCCL 2.30 or newer")
    assert any("left-out: skipped" in text for text in said)
    deadline = time.monotonic() + 10
    while is_running(int((tmp_path / "pid").read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int((tmp_path / "pid").read_text())), "what a killed step had started lives on"


def test_a_run_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    steps, lines = [step("a", "{'round': 1}"), step("b"), step("c")], tmp_path / "proof.jsonl"
    run_steps(steps, H100, "here", lines, lambda text: None)
    run_steps([step("a", "{'round': 2}")], H100, "here", lines, lambda text: None)
    run_steps([step("b", "{'round': 3}")], H100, "another machine", lines, lambda text: None)
    found = latest(lines, "here", steps)
    assert [(one.step, one.figures) for one in found] == [("a", {"round": 2}), ("b", {}), ("c", {})]
    assert [one.name for one in chosen(steps, first="b")] == ["b", "c"]
    assert [one.name for one in chosen(steps, only=("c", "a"))] == ["a", "c"]
    with pytest.raises(UnknownStepError, match=r"no step 'd': the steps are a, b, c"):
        chosen(steps, only=("d",))


def test_what_a_machine_lacks_is_said() -> None:
    cpu, soft = Machine("cpu"), Machine("soft", ("soft CUDA",))
    assert machine.cuda_tensors(cpu) == "needs tensors of device cuda, this run is on the CPU"
    assert machine.a_gpu(soft) == "needs a GPU, this is a dry run on soft CUDA devices"
    assert machine.several_gpus(H100) == "needs two GPUs or more, this machine has 1"
    assert machine.nccl(cpu) == "needs NCCL, which this torch was built without"
    assert machine.nccl_for_shared_gpus(H100) == (
        "needs NCCL 2.30 or newer, which lets several ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1); this torch has 2.28.9"
    )
    newer = Machine("cuda", H100.gpus, nccl=(2, 30, 7), free_bytes=int(3 * GB))
    assert machine.nccl_for_shared_gpus(newer) is None
    assert machine.free_memory(14 * GB)(newer) == "needs 14 GB of free GPU memory, 3.0 GB are free"
    assert machine.free_memory(14 * GB)(H100) is None
    assert machine.cuda_tensors(H100) is machine.a_gpu(H100) is machine.nccl(H100) is None


def test_steps_take_at_most_eight_minutes_and_get_their_machine() -> None:
    steps = {one.name: one for one in steps_of(Path("gpu_proof.py"), H100)}
    assert list(steps) == [kind.name for kind in KINDS]
    assert all(one.limit_s <= 480 for one in steps.values())
    assert steps["nccl-shared-gpu"].env["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    told = json.loads(steps["parity"].env["HF_PARALLEL_GPU_PROOF_MACHINE"])
    assert Machine(**told) == H100


def test_the_card_names_machine_versions_and_what_failed(tmp_path: Path) -> None:
    figures = "{'passed': 3, 'failures': [], 'skipped': 0}"
    steps = [step("tests", figures), step("parity", "{'failed': 'pp2: losses | differ'}", "sys.exit(1)")]
    outcomes = run_steps(steps, H100, H100.label, tmp_path / "lines", lambda text: None)
    text = card(H100, outcomes, "abc1234", "2026-11-22")
    for part in (
        "1 x NVIDIA H100 80GB HBM3, 80 GB",
        "driver 580.1",
        "torch 2.11.0, CUDA 13.0, NCCL 2.28.9",
        "abc1234",
    ):
        assert part in text
    assert "| tests | passed |" in text
    assert "3 passed, 0 failed, 0 skipped" in text
    assert "| parity | **failed** |" in text
    assert "pp2: losses / differ |" in text
    assert "    pp2: losses | differ" in text
    assert "DRY RUN" in card(Machine("cpu"), [], "abc1234", "2026-11-22")


def test_wheels_that_are_news_to_this_python_are_unpacked_without_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = f"cp{sys.version_info.major}{sys.version_info.minor}"
    names = {
        "fresh-1.10-py3-none-any.whl": True,
        "fresh-1.9-py3-none-any.whl": False,  # nor beside a newer one
        f"compiled-2.0-{mine}-{mine}-manylinux_2_28_x86_64.whl": True,
        "other-1.0-cp38-cp38-manylinux_2_28_x86_64.whl": False,
        "stable-1.0-cp38-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl": True,
        "windows-1.0-py3-none-win_amd64.whl": False,
        "pytest-0.1-py3-none-any.whl": False,  # this Python has a newer one
    }
    monkeypatch.setattr(wheels.platform, "machine", lambda: "x86_64")
    for name in names:
        package = name.split("-")[0]
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"{package}_of_wheel/__init__.py", name)
            archive.writestr(f"{package}-1.0.data/purelib/{package}_data.py", "")
            archive.writestr(f"{package}-1.0.data/scripts/run", "")
            archive.writestr("../outside.py", "")
    unpacked = wheels.unpack(tmp_path, tmp_path / "site")
    assert sorted(unpacked) == sorted(" ".join(name.split("-")[:2]) for name, used in names.items() if used)
    assert "fresh-1.10" in (tmp_path / "site" / "fresh_of_wheel" / "__init__.py").read_text()
    assert (tmp_path / "site" / "fresh_data.py").exists()
    assert not list(tmp_path.rglob("outside.py"))
    assert not list((tmp_path / "site").rglob("run"))


def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    """The real command; with a GPU it would find none either."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_proof.py"), "--reports", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "sees no GPU with CUDA_VISIBLE_DEVICES=, so nothing was run" in ended.stderr
    assert "--device soft" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_wheels_are_filled_with_the_releases_that_this_project_takes() -> None:
    wanted = wheels.wanted(ROOT / "pyproject.toml")
    assert any(one.startswith("transformers>=") and ",<" in one for one in wanted)
    assert any(one.startswith("pydantic>=") for one in wanted)
    assert not any(one.startswith(("torch", "datasets")) for one in wanted)
