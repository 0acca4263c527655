"""`hf-parallel plan` prints ranked layouts, explains one, and says what is wrong with the request."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from hf_parallel.cli.main import app
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.predict import predict


CONFIG = LlamaConfig(
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=1024,
    vocab_size=4096,
)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(folder)
    return [
        "plan",
        "--model",
        str(folder),
        "--gpu",
        "rtx3090",
        "--gpus-per-node",
        "4",
        "--seq",
        "512",
        "--batch",
        "16",
    ]


def test_the_plans_of_the_command_are_those_of_python(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--json", "--top", "3"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert len(rows) == 3
    for row in rows:
        found = predict(CONFIG, Cluster(1, 4, "rtx3090"), row["layout"], seq_len=512)
        assert row["step_s"] == pytest.approx(found.step_s)
        assert row["memory_bytes"] == pytest.approx(dict(found.memory_bytes))


def test_the_table_says_why_the_others_lose(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--top", "2"])
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.output
    assert "1: first of what fits" in result.output
    assert "\n2: " in result.output


def test_the_fewest_gpus_are_said(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--objective", "min-gpus", "--json", "--top", "1"])
    assert result.exit_code == 0, result.output
    assert [row["gpus"] for row in json.loads(result.output)] == [1]


def test_scaling_shows_speed_and_what_messages_cost(command: list[str]) -> None:
    # Without ZeRO: replicas that share out the optimizer's work may be more than so many times as fast.
    options = ["--scaling", "--layout", "tp=1,pp=1,zero=0,micro_batch=4"]
    result = CliRunner().invoke(app, [*command, *options, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert [row["gpus"] for row in rows] == [1, 2, 4]
    assert rows[0]["speed_up"] == pytest.approx(1)
    assert rows[0]["ratio"] is None
    assert 1 < rows[1]["speed_up"] < rows[2]["speed_up"] <= 4
    assert rows[2]["ratio"] < rows[1]["ratio"]
    assert "computation" in CliRunner().invoke(app, [*command, *options]).output


def test_what_all_plans_have_is_said_once(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--adapters", "100000", "--layout", "kernels=compiled"])
    assert result.exit_code == 0, result.output
    assert re.findall(r".*adapters.*", result.output) == ["all of them: kernels=compiled, adapters=100000"]


def test_large_numbers_have_no_exponent(command: list[str]) -> None:
    many = [*command[:-1], "4096", "--seq", "16384", "--why", "tp=4"]
    result = CliRunner().invoke(app, many)
    assert result.exit_code == 0, result.output
    assert re.search(r"tp sends \d{3,} GB", result.output), result.output
    assert "e+" not in result.output


def test_adapters_need_less(command: list[str]) -> None:
    def facts(*options: str) -> dict[str, float]:
        result = CliRunner().invoke(app, [*command, *options, "--why", "dp=4,zero=1", "--json"])
        assert result.exit_code == 0, result.output
        found: dict[str, float] = json.loads(result.output)
        return found

    whole, adapters = facts(), facts("--adapters", "100000")
    assert adapters["total_bytes"] < whole["total_bytes"]
    assert adapters["step_s"] < whole["step_s"]


@pytest.mark.parametrize("options", [("--adapters",), ("--adapters", "r16"), ("--adapters=r16",)])
def test_adapters_of_a_rank_are_those_of_peft(command: list[str], options: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    config = AutoConfig.from_pretrained(command[command.index("--model") + 1])
    model = AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    result = CliRunner().invoke(app, [*command, *options, "--json"])
    assert result.exit_code == 0, result.output
    assert {plan["layout"]["adapters"] for plan in json.loads(result.output)} == {trained}


def test_the_example_of_the_page_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text()
    code, printed = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text"))
    assert code is not None
    assert printed is not None
    exec(code[1], {})
    assert capsys.readouterr().out == printed[1]


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys; from hf_parallel.cli.main import app; from typer.testing import CliRunner;"
        "assert not CliRunner().invoke(app, ['plan', '--help']).exit_code;"
        "import hf_parallel; hf_parallel.predict, hf_parallel.plan, hf_parallel.Cluster;"
        "print({'torch', 'transformers', 'accelerate'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["set()"]


def test_one_layout_is_explained_by_term(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--why", "tp=2,pp=2,num_microbatches=4"])
    assert result.exit_code == 0, result.output
    for word in ("step", "bubble", "weights", "overhead", "fits"):
        assert word in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--why", "tp=3"], "they must be equal"),
        (["--why", "tpp=2"], "Did you mean tp"),
        (["--why", "tp"], "expected key=value"),
        (["--objective", "token"], "Did you mean tokens"),
        (["--why", "tp=2,dp=2,micro_batch=3"], "it is a multiple of 6"),
        (
            ["--adapters", "-1"],
            "adapters=-1: expected an integer of 0 or more, the parameters that are trained, or a rank",
        ),
        (["--adapters", "r0"], "adapters=r0: expected an integer of 0 or more"),
        (["--layout", "kernels=egaer"], "Did you mean eager"),
    ],
)
def test_a_request_that_cannot_be_ends_with_its_reason(command: list[str], arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*command, *arguments])
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--adapters", "100000", "--bits", "4.5"], marks=pytest.mark.long),
        ["--layout", "param_dtype=fp32"],
    ],
    ids=str,
)
def test_what_is_written_says_how_it_is_counted_again(command: list[str], options: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert CliRunner().invoke(app, [*command, *options, "--write", str(path)]).exit_code == 0
    head = path.read_text(encoding="utf-8")
    assert ("loaded in fp32" in head) == ("param_dtype=fp32" in options)
    assert ("dtype=torch.bfloat16" in head) == ("param_dtype=fp32" not in options)
    (count,) = re.findall(r"# +hf-parallel (validate .*)", head)
    result = CliRunner().invoke(
        app, [str(path) if word == path.name else word for word in count.split()] + ["--gpu-gb", "25.4"]
    )
    assert result.exit_code == 0, result.output


def test_all_problems_of_a_request_are_told_at_once(tmp_path: Path) -> None:
    options = ["--model", str(tmp_path), "--gpu", "rtx3090", "--gpus-per-node", "0", "--seq", "-1", "--batch", "0"]
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 1
    for problem in ("gpus_per_node=0", "seq=-1", "batch=0"):
        assert f"{problem}: expected" in result.output


def test_a_config_that_is_not_there_is_no_name_of_a_model(tmp_path: Path) -> None:
    options = ["--gpu", "rtx3090", "--seq", "8", "--batch", "8"]
    result = CliRunner().invoke(app, ["plan", "--model", "path/too/config.json", *options])
    assert result.exit_code == 1
    assert "'path/too/config.json': no config found: there is no such file in" in result.output


def test_a_request_without_options_says_which_are_missing() -> None:
    result = CliRunner().invoke(app, ["plan"])
    assert result.exit_code == 2
    assert "Missing option '--model'" in result.output
