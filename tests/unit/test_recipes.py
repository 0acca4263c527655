"""Recipes are found, read from one place only, say what they need, and are refused when accelerate would not do what they say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hf_parallel.cli.main import app
from hf_parallel.errors import ConfigError
from hf_parallel.settings.recipes import find_recipe, list_recipes, load_recipe, read_section, recipes_folder


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import recipes_page  # noqa: E402
import recipes_planned  # noqa: E402


ON_CPU = [name for name in list_recipes() if name.startswith("cpu_")]
ON_GPU = [name for name in list_recipes() if not name.startswith("cpu_")]
HEADER = ("# Assumes: ", "# Launch: ", "# Change: ", "# See also: ")
BASE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 4}


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def with_section(section: dict[str, Any] | None, **accelerate: Any) -> dict[str, Any]:
    return BASE | {"parallelism_config": {"hf_parallel": section}} | accelerate


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_loads_and_fits_its_processes(name: str) -> None:
    config = load_recipe(name)
    _, accelerate = read_section(find_recipe(name))
    assert config.dp_size(accelerate["num_processes"]) >= 1
    # Machines must know the port before they start; on one machine any free one will do.
    assert accelerate["main_process_port"] == (0 if accelerate["num_machines"] == 1 else 29500)


@pytest.mark.parametrize("name", ON_CPU)
def test_every_cpu_recipe_is_named_after_its_layout(name: str) -> None:
    config, (_, accelerate) = load_recipe(name), read_section(find_recipe(name))
    replicas, ep_size = config.dp_size(accelerate["num_processes"]), config.ep_size
    sizes = {
        "pp": config.pp_size,
        "dp": replicas // ep_size,
        "ep": ep_size,
        "tp": config.tp_size,
        "sp": config.sp_size,
    }
    schedule = config.pipeline.schedule.removeprefix("pipedream_").split("_")[0]
    variant = [schedule] if config.pp_size > 1 and schedule != "1f1b" else []
    variant += ["sp"] if config.tensor_parallel.sequence_parallel else []
    zero = "deepspeed" if config.zero.engine == "deepspeed" else f"zero{config.zero.stage}"
    variant += [zero] if config.zero.stage else []
    variant += ["offload"] if config.zero.offload_optimizer != "none" and zero != "deepspeed" else []
    variant += [config.gradient_compression.method] if config.gradient_compression.method != "none" else []
    variant += [f"local{config.local_sgd.sync_every}"] if config.local_sgd.sync_every > 1 else []
    assert name == "_".join(["cpu", *[f"{axis}{size}" for axis, size in sizes.items() if size > 1], *variant])


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_starts_with_the_four_header_lines(name: str) -> None:
    lines = find_recipe(name).read_text().splitlines()
    for prefix, line in zip(HEADER, lines[:4], strict=True):
        assert line.startswith(prefix)
        assert line.removeprefix(prefix).strip()
    machines = read_section(find_recipe(name))[1]["num_machines"]
    where = " --machine_rank RANK --main_process_ip IP" if machines > 1 else ""
    assert lines[1] == f"# Launch:  accelerate launch --config_file recipes/{name}.yaml{where} SCRIPT.py"
    siblings = [other for other in list_recipes() if other != name and other in lines[3]]
    assert siblings


@pytest.mark.parametrize("name", ON_GPU)
def test_every_gpu_recipe_fits_what_it_assumes_and_says_what_it_needs(name: str) -> None:
    """The numbers at its head are those of the arithmetic: `make recipes-page` writes them."""
    verdict = recipes_page.verdict(name)
    assert (verdict.errors, verdict.warnings) == ((), ())
    text = find_recipe(name).read_text()
    assert recipes_page.header(name)
    assert recipes_page.with_header(name, text) == text
    assert "use_cpu" not in text


@pytest.mark.parametrize("name", sorted(recipes_planned.CLUSTERS))
def test_a_recipe_is_what_the_planner_chooses_or_says_why_not(name: str) -> None:
    head = " ".join(line.lstrip("# ") for line in find_recipe(name).read_text().splitlines() if line.startswith("#"))
    assert " Predicted " in head
    assert ("This recipe is another: " + recipes_planned.WHY.get(name, "") in head) == (name in recipes_planned.WHY)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(recipes_planned.CLUSTERS))
def test_what_a_recipe_says_of_the_planner_is_what_it_chooses(name: str) -> None:
    assert recipes_planned.choice(name).is_chosen == (name not in recipes_planned.WHY)
    text = find_recipe(name).read_text()
    assert recipes_planned.with_plan(name, text) == text


@pytest.mark.long
@pytest.mark.parametrize("name", ON_GPU)
def test_validate_passes_on_every_gpu_recipe_with_its_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recipes_page.run_of(name)
    monkeypatch.setattr("hf_parallel.cli.validate.this_machine", lambda: recipes_page.machine_of(name))
    recipes_page.config_of(run).save_pretrained(tmp_path)
    sizes = {"--rows": run.work.rows, "--length": run.work.length, "--adapters": run.adapters, "--bits": run.bits}
    limits = {"--dtype": run.precision, "--gpu-gb": run.gpu_gb, "--host-gb": run.host_gb}
    options = [str(item) for pair in (sizes | limits).items() for item in pair]
    result = CliRunner().invoke(app, ["validate", name, "--model", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    assert "warning" not in result.output
    layout = load_recipe(name)
    assert f"valid, tp {layout.tp_size} x pp {layout.pp_size} x dp" in result.output


def test_the_page_of_recipes_is_what_the_code_counts() -> None:
    text = recipes_page.PAGE.read_text()
    assert recipes_page.page(text) == text
    for name in list_recipes():
        assert f"| `{name}` |" in text


@pytest.mark.parametrize("name", ON_GPU)
def test_every_gpu_recipe_is_launched_by_accelerate_with_its_line(name: str, tmp_path: Path) -> None:
    """Its own parser and checks take the line; nothing is started."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    line = find_recipe(name).read_text().splitlines()[1].split("accelerate launch ")[1]
    arguments = line.replace("recipes/", f"{recipes_folder()}/").replace("RANK", "0").replace("IP", "10.0.0.1").split()
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    _, accelerate = read_section(find_recipe(name))
    assert args.multi_gpu
    assert (args.num_processes, args.num_machines) == (accelerate["num_processes"], accelerate["num_machines"])
    half = "fp16" if name == "qlora_2xt4" else "bf16"  # a T4 has no bf16
    assert (args.mixed_precision, args.machine_rank) == (half, 0)
    assert args.main_process_ip == ("10.0.0.1" if args.num_machines > 1 else None)


@pytest.mark.parametrize("name", list_recipes())
def test_accelerate_itself_reads_every_recipe(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert "hf_parallel" in load_config_from_file(str(find_recipe(name))).parallelism_config


def test_a_file_wins_over_a_recipe_of_the_same_name(tmp_path: Path) -> None:
    assert find_recipe("cpu_pp2.yaml") == recipes_folder() / "cpu_pp2.yaml"
    mine = write(tmp_path / "cpu_pp2.yaml", with_section({"pp_size": 4}))
    assert find_recipe("cpu_pp2.yaml") == mine
    assert load_recipe("cpu_pp2.yaml").pp_size == 4


def test_a_missing_recipe_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"'cpu_pp3'.*Did you mean cpu_pp2\?.*cpu_pp2_tp2"):
        find_recipe("cpu_pp3")
    with pytest.raises(ConfigError, match="this file does not exist"):
        find_recipe("elsewhere/cpu_pp2.yaml")


def test_a_null_section_is_all_defaults(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path / "a.yaml", with_section(None))).model_parallel_size == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BASE | {"fsdp_config": {"hf_parallel": {}}}, r"fsdp_config\.hf_parallel: .*Move them there"),
        (with_section({}) | {"fp8_config": {"hf_parallel": {}}}, r"fp8_config\.hf_parallel"),
        (BASE | {"hf_parallel": {"pp_size": 2}}, r"hf_parallel: the settings stand in parallelism_config"),
        (BASE, r"no parallelism_config\.hf_parallel section"),
        (with_section({"pp_size": 0}), r"(?s)parallelism_config\.hf_parallel:\npp_size=0"),
        (BASE | {"parallelism_config": {"hf_parallel": 3}}, r"hf_parallel=3: expected a mapping"),
        (with_section({"pp_size": 2}, distributed_type="MULTI_CPU"), r"'MULTI_CPU': .*ONE process.*use_cpu: true"),
        (with_section({}, distributed_type="MULTI_CPU"), r"'MULTI_CPU'"),
        (with_section({"pp_size": 2}, distributed_type="NO"), r"distributed_type='NO'.*MULTI_GPU"),
        (with_section({"pp_size": 2}, distributed_type="DEEPSPEED"), r"'DEEPSPEED' with tp_size=1 and pp_size=2"),
        (with_section({"tp_size": 2}, distributed_type="FSDP"), r"'FSDP' with tp_size=2"),
        (with_section({"tp_size": 2}, distributed_type="MEGATRON_LM"), r"'MEGATRON_LM'"),
        (with_section({"pp_size": 3}), r"num_processes=4 is not a multiple of .*Set num_processes to 3 or 6"),
        (with_section({"pp_size": 8}), r"num_processes=4 is below .*Set num_processes to 8"),
    ],
)
def test_a_file_that_cannot_work_is_refused_by_name(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.yaml", content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(str(path))


def test_stock_sizes_beside_our_section_are_refused(tmp_path: Path) -> None:
    content = with_section({"tp_size": 2})
    content["parallelism_config"]["parallelism_config_tp_size"] = 2
    with pytest.raises(ConfigError, match=r"parallelism_config_tp_size=2 beside .*Remove it"):
        load_recipe(write(tmp_path / "a.yaml", content))


def test_fsdp_with_nothing_to_cut_is_accepted(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path / "a.yaml", with_section({}, distributed_type="FSDP"))).tp_size == 1


def test_a_file_that_is_not_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1")
    with pytest.raises(ConfigError, match=r"not valid YAML"):
        load_recipe(path)


def test_a_key_written_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("num_processes: 2\nparallelism_config:\n  hf_parallel:\n    pp_size: 2\n    pp_size: 4\n")
    with pytest.raises(
        ConfigError, match=r"twice\.yaml:5: not valid YAML: .*'pp_size' is written twice, first in line 4"
    ):
        read_section(path)


@pytest.mark.parametrize("name", list_recipes())
def test_no_recipe_asks_for_what_a_loop_of_ones_own_refuses(name: str) -> None:
    monitor = load_recipe(name).monitor
    assert not monitor.report
    assert not monitor.trace_steps


def test_a_folder_or_a_device_is_no_settings_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a folder, not a file"):
        load_recipe(tmp_path)
    with pytest.raises(ConfigError, match="this is a device or a pipe, not a file"):
        load_recipe("/dev/null")
