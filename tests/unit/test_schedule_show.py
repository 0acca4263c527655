"""If these fail, the picture of a schedule or the figures beside it say something else than the simulator."""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from hf_parallel.cli.main import app
from hf_parallel.errors import UnsupportedError
from hf_parallel.pipeline_parallel.schedule.actions import parse_schedule, read_schedule, required_send_window
from hf_parallel.pipeline_parallel.schedule.schedules import SCHEDULES, build_schedule
from hf_parallel.pipeline_parallel.schedule.show import (
    columns_per_unit,
    timeline_text,
    write_picture,
    write_trace,
)
from hf_parallel.pipeline_parallel.schedule.simulate import Simulation, peak_activations, simulate


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["schedule", *arguments], env={"COLUMNS": "120"})


def timed(name: str = "1f1b", ranks: int = 2, microbatches: int = 2) -> Simulation:
    schedule = build_schedule(name, ranks, microbatches)
    stages = len({action.stage for actions in schedule for action in actions})
    return simulate(schedule, [1.0] * stages, [2.0] * stages)


def test_timeline_has_a_row_a_rank_and_a_column_a_moment() -> None:
    rows = timeline_text(timed(), scale=2.0).plain.splitlines()
    assert rows == ["rank 0  0f1f....0bbb..1bbb", "rank 1  ..0f0bbb1f1bbb...."]


def test_timeline_colours_kinds_and_stages_apart() -> None:
    text = timeline_text(timed("zbv_zero_bubble", 1, 1), scale=2.0)
    assert text.plain == "rank 0  0f0f0i0w0i0w"
    assert len({str(span.style) for span in text.spans if span.start < span.end}) == 6


def test_a_long_schedule_fits_and_shows_last_digits() -> None:
    result = timed("gpipe", 2, 16)
    scale = columns_per_unit([result], 51)
    assert scale == 1.0
    rows = timeline_text(result, scale=scale).plain.splitlines()
    assert rows[0].startswith("rank 0  0123456789012345..")
    assert {len(row) for row in rows} == {8 + 51}
    assert all(
        len(row) <= 8 + 30 for row in timeline_text(result, scale=columns_per_unit([result], 30)).plain.splitlines()
    )
    assert timeline_text(simulate(parse_schedule("0F0,0B0"), [0.0], [0.0]), scale=1.0).plain == "rank 0  "


def test_without_colours_letters_tell_the_kinds_apart() -> None:
    result = timed("zbv_zero_bubble", 2, 12)
    rows = timeline_text(result, scale=columns_per_unit([result], 40, in_colour=False)).plain.splitlines()
    for kind in "fiw":
        assert all(f"11{kind}" in row for row in rows)
    assert columns_per_unit([result], 4000, in_colour=False) == columns_per_unit([result], 4000)


def test_svg_is_xml_with_every_schedule(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_picture(tmp_path / "a.svg", {"a<b": timed("zbv_zero_bubble", 3, 5), "1f1b": timed()}, "svg")
    texts = [node.text for node in ElementTree.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 2", "4", "f: forward", "w: gradients of the weights"} <= set(texts)
    figures = r"step [\d.]+, bubble [\d.]+%, activations of [\d.]+ microbatches at most"
    for title in ("a<b", "1f1b"):
        assert any(re.fullmatch(f"{title}: {figures}", text or "") for text in texts)
    assert any((text or "").startswith("time; 1 is the unit of --times") for text in texts)


def test_trace_holds_every_span_in_microseconds(tmp_path: Path) -> None:
    results = {"zbv": timed("zbv_zero_bubble", 3, 5), "1f1b": timed()}
    write_trace(tmp_path / "a.json", results)
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    spans = {(e["pid"], e["tid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"}
    expected = {
        (first + rank, action.stage, str(action)): tuple(1000 * time for time in result.spans[action])
        for first, result in ((0, results["zbv"]), (3, results["1f1b"]))
        for rank, actions in enumerate(result.schedule)
        for action in actions
    }
    assert spans == expected
    assert [e["args"]["name"] for e in events if e["ph"] == "M"][2:4] == ["zbv rank 2", "1f1b rank 0"]


def test_a_picture_is_written_or_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importer = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return importer(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without_matplotlib)
        with pytest.raises(UnsupportedError, match=r"pip install 'hf_parallel\[viz\]'"):
            write_picture(tmp_path / "a.png", {"1f1b": timed()}, "png")
    pytest.importorskip("matplotlib")
    write_picture(tmp_path / "a.png", {"1f1b": timed(), "zbv": timed("zbv_zero_bubble", 3, 5)}, "png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_schedules_and_their_pictures_import_no_torch() -> None:
    code = "import hf_parallel.cli.schedule, sys; print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_command_compares_schedules_with_the_simulators_figures() -> None:
    names = [option for name in SCHEDULES for option in ("--schedule", name)]
    rows = json.loads(invoke("--pp", "4", "--microbatches", "8", *names, "--times", "1,2,0.5", "--json").output)
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    for row in rows:
        schedule = build_schedule(row["schedule"], 4, 8)
        parts = row["stages"] // 4
        costs = [[cost / parts] * row["stages"] for cost in (1.0, 2.0, 0.5)]
        result = simulate(schedule, costs[0], costs[1], weight_costs=costs[2])
        assert (row["step_time"], row["bubble_fraction"]) == (result.makespan, result.bubble_fraction)
        assert row["peak_activations"] == list(peak_activations(schedule))


def test_command_prints_timelines_and_a_table() -> None:
    output = invoke(
        "--schedule", "zbv", "--schedule", "zb", "--schedule", "interleaved", "--stages-per-rank", "3"
    ).output
    assert re.findall(r"^(\w+): step ", output, re.M) == [
        "zbv_zero_bubble",
        "interleaved_zero_bubble",
        "interleaved_1f1b",
    ]
    assert output.count("rank 3") == 3
    assert re.search(r"zbv_zero_bubble\W+8\W+25\.50\W+5\.9%\W+4 4 4 4", output)
    assert re.search(r"interleaved_1f1b\W+12\W", output)


def test_command_writes_a_schedule_that_it_reads(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"a.{kind}" for kind in ("csv", "svg", "trace")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    assert invoke("--pp", "3", "--microbatches", "5", "--schedule", "zbv", *options).exit_code == 0
    assert all(path.stat().st_size for path in files.values())
    assert read_schedule(files["csv"]) == build_schedule("zbv_zero_bubble", 3, 5)
    rows = json.loads(invoke("--file", str(files["csv"]), "--schedule", "zbv", "--json").output)
    assert [row["schedule"] for row in rows] == [str(files["csv"]), "zbv_zero_bubble"]
    assert rows[0] | {"schedule": ""} == rows[1] | {"schedule": ""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--times", "1,2"], "times='1,2': three numbers"),
        (["--times", "1,nan,1"], "three numbers of at least 0"),
        (["--times", "1,2,3"], "W=3 is part of the full backward B=2"),
        (["--latency", "-1"], "latency=-1.0"),
        (["--pp", "0"], "num_stages=0, num_microbatches=8"),
        (["--schedule", "2f2b"], "schedule '2f2b' is unknown"),
        (["--stages-per-rank", "2"], "schedule 1f1b needs exactly 1 a rank"),
        (["--file", "absent.csv"], "absent.csv: cannot be read"),
        (["--svg", "absent/a.svg"], "absent/a.svg: cannot be written (No such file or directory)"),
        (["--schedule", "1f1b", "--schedule", "zb", "--csv", "a.csv"], "one file holds one schedule"),
    ],
)
def test_command_says_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert (result.exit_code, message in result.output) == (1, True), result.output
    as_json = invoke(*arguments, "--json")
    assert as_json.exit_code == 1
    assert message in json.loads(as_json.output)["error"]
    assert list(tmp_path.iterdir()) == []


def test_command_refuses_sizes_that_the_file_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert "--pp=4: " in (result := invoke("--file", str(path), "--pp", "4")).output
    assert result.exit_code == 1
    assert "has 1. Set it to 1 or leave it out." in invoke("--file", str(path), "--microbatches", "2").output


def test_the_page_says_what_the_command_prints() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "schedules.md").read_text()
    command = re.search(r"```bash\nhf-parallel schedule (.*?)```", page, re.S)
    assert command
    rows = json.loads(invoke(*command[1].replace("\\", "").split(), "--json").output)
    lines = [
        f"| `{row['schedule']}` | {row['step_time']:.1f} | {row['bubble_fraction']:.1%} | "
        + " ".join(f"{peak:g}" for peak in row["peak_activations"])
        for row in rows
    ]
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    assert [line for line in lines if f"{line} |" not in page] == []
    picture, example = re.findall(r"```text\n(.*?)```", page, re.S)
    names = re.findall(r"^(\w+): step ", picture, re.M)
    assert len(names) == 4
    options = [option for name in names for option in ("--schedule", name)]
    printed = CliRunner().invoke(
        app, ["schedule", "--pp", "3", "--microbatches", "6", *options], env={"COLUMNS": "100"}
    )
    assert printed.output.startswith(picture)
    assert required_send_window(parse_schedule(example), 2, 2) == 2
