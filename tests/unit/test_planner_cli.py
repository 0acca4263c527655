"""`hf-parallel plan` prints ranked layouts, explains one, and says what is wrong with the request."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig
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
    assert "fastest" in result.output


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
        (["--layout", "kernels=egaer"], "Did you mean eager"),
    ],
)
def test_a_request_that_cannot_be_ends_with_its_reason(command: list[str], arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*command, *arguments])
    assert result.exit_code == 1
    assert message in result.output
