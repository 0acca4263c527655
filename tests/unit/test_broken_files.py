"""What people get wrong in a settings file: each mistake is named in its line, with the fix nearest to what was meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_parallel.cli.main import app
from hf_parallel.dry_run.check_file import Finding, check_file
from hf_parallel.machine.facts import Machine
from hf_parallel.settings.recipes import load_recipe


HEAD = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_processes: 4
use_cpu: true
"""  # lines 1 to 4
OURS = "parallelism_config:\n  hf_parallel:\n"


def ours(*lines: str, head: str = HEAD) -> str:
    """A file whose section has these lines; the first of them is line 7 below the usual head."""
    return head + OURS + "".join(f"    {line}\n" for line in lines)


def around(line: str) -> str:
    """A file with this line 5 around a section that is right."""
    return ours("pp_size: 2", head=f"{HEAD}{line}\n")


def instead(old: str, new: str) -> str:
    return ours("pp_size: 2", head=HEAD.replace(old, new))


# Content, line, what the one error says.
BROKEN: dict[str, tuple[str, int, str]] = {
    # syntax
    "an open brace": (HEAD + "parallelism_config:\n  hf_parallel: {pp_size: 2\n", 6, r"not valid YAML: .*Close the brace with }"),
    "an open bracket": (ours("pp_size: 2", "pipeline:", "  split: [1, 2"), 9, r"not valid YAML: .*Close the bracket with \]"),
    "an open quote": (instead("use_cpu: true", "use_cpu: 'true"), 4, r"not valid YAML: .*Close the quote"),
    "a tab": (f"{HEAD}parallelism_config:\n\thf_parallel:\n", 6, r"not valid YAML: .*Indent with spaces"),
    "a key twice": (ours("pp_size: 2", "tp_size: 1", "pp_size: 4"), 9, r"'pp_size' is written twice, first in line 7\. Remove one"),
    "a top key twice": (around("num_processes: 8"), 5, r"'num_processes' is written twice, first in line 3\. Remove one"),
    "uneven indents": (ours("pp_size: 2") + "   tp_size: 1\n", 8, r"not valid YAML: .*Indent all keys of a section alike"),
    "an indent too deep": (ours("pp_size: 2", "  tp_size: 1"), 8, r"not valid YAML: .*Indent all keys of a section alike"),
    "no colon before others": (ours("pp_size 2", "tp_size: 1"), 8, r"not valid YAML: .*(Write `key: value`|Indent all keys)"),
    "no colon": (ours("pp_size 2"), 6, r"hf_parallel='pp_size 2': expected a mapping.*Write pp_size: 2 with a colon"),
    "an at sign": (around("main_process_ip: @node"), 5, r"not valid YAML: .*Put the value in quotes"),
    "a star": (around("main_process_ip: *"), 5, r"not valid YAML: "),
    "a name that is not there": (around("main_process_ip: *first"), 5, r"undefined alias 'first'\. Put the value in quotes, or write &NAME"),
    "a merge": (f"{HEAD}gpu_ids: &a all\nparallelism_config:\n  hf_parallel:\n    <<: {{pp_size: 2}}\n", 8, r"tag:yaml.org,2002:merge'\. Write the keys out"),
    "a tag": (ours("pp_size: !int 2"), 7, r"the tag '!int'\. Remove the word that begins with an exclamation mark\.$"),
    "a template": (around("main_process_ip: {{ node }}"), 5, r"unhashable key\. Put the value in quotes.*YAML replaces none"),
    "an anchor in itself": (f"{HEAD}parallelism_config: &a\n  hf_parallel: *a\n", 5, r"an anchor contains itself"),
    "no space after the colon": (ours("pp_size:2", "tp_size: 1"), 8, r"not valid YAML: .*Indent all keys"),
    "a word alone": ("hello\n", 1, r"expected a mapping, found str\. Write `key: value` lines\.$"),
    "lines of Windows": (ours("pp_sise: 2").replace("\n", "\r\n"), 7, r"^pp_sise: unknown key\. Did you mean pp_size\?"),
    "a number as a key": (around("1: 2"), 5, r"^1: keys are strings\. Quote or remove it"),
    # nesting and kinds
    "ours at the top": (f"{HEAD}hf_parallel:\n  pp_size: 2\n", 5, r"^hf_parallel: the settings stand in parallelism_config\.hf_parallel"),
    "ours in another section": (f"{HEAD}fsdp_config:\n  hf_parallel: {{}}\n", 6, r"^fsdp_config\.hf_parallel: the settings stand in"),
    "ours misspelt": (f"{HEAD}parallelism_config:\n  hf_paralel: {{}}\n", 6, r"^parallelism_config\.hf_paralel: unknown key.*hf_parallel\?"),
    "a list of ours": (f"{HEAD}{OURS}    - pp_size: 2\n", 6, r"hf_parallel=\[.*expected a mapping.*Remove the dashes"),
    "a list of a section": (ours("zero:", "  - stage: 1"), 7, r"^zero=\[.*expected a mapping.*Remove the dashes"),
    "a number for a section": (ours("zero: 1"), 7, r"^zero=1: expected a mapping with the keys stage,.*Write zero: \{stage: 1\}\.$"),
    "a list for all": ("- num_processes: 2\n", 1, r"expected a mapping, found list"),
    "a section in a section": (ours("zero:", "  pp_size: 2"), 8, r"^zero\.pp_size: unknown key here\. Move it to pp_size at the top"),
    "a key outside of its section": (ours("pp_size: 2", "schedule: 1f1b"), 8, r"^schedule: unknown key here\. Move it to pipeline\.schedule"),
    "accelerate's key in ours": (ours("mixed_precision: bf16"), 7, r"^mixed_precision: unknown key\. It stands at the top level"),
    "the trainer's key in ours": (ours("learning_rate: 1e-4"), 7, r"^learning_rate: unknown key\. It is an argument of TrainingArg"),
    "ours outside of its section": (ours("pp_size: 2") + "zero: {stage: 1}\n", 8, r"^zero: unknown key.*Move it to parallelism_config\.hf_parallel\.zero\.$"),
    "a word for a section": (ours("gradient_compression: int8"), 7, r"expected a mapping.*Write gradient_compression: \{method: int8\}\.$"),
    "a schedule for a section": (ours("pp_size: 2", "pipeline: zbv"), 8, r"Write pipeline: \{schedule: zbv\}\.$"),
    "a truth for a section": (ours("zero: true"), 7, r"^zero=true: expected a mapping.*Write its keys on lines below it"),
    "automatic": (f"{HEAD}parallelism_config:\n  hf_parallel: automatic\n", 6, r"hf_parallel='automatic': .*Set it to auto\.$"),
    "two documents": (ours("pp_size: 2") + "---\na: 1\n", 8, r"a single document in the stream, but found another.*Remove the line"),
    # keys that others have
    "a derived size": (ours("pp_size: 2", "dp_size: 2"), 8, r"^dp_size: .*is derived: num_processes / \(tp_size \* pp_size \* sp_size\)\. Remove it"),
    "megatron's name": (ours("tensor_model_parallel_size: 2"), 7, r"Did you mean tp_size\?"),
    "deepspeed's name": (ours("zero_stage: 1"), 7, r"Did you mean zero\.stage\?"),
    # typos in keys of every section
    "a top key": (instead("num_processes", "num_proceses"), 3, r"^num_proceses: unknown key.*Did you mean num_processes\?"),
    "a key": (ours("pp_sise: 2"), 7, r"^pp_sise: unknown key\. Did you mean pp_size\?"),
    "pipeline": (ours("pp_size: 2", "pipeline:", "  shedule: 1f1b"), 9, r"^pipeline\.shedule: .*Did you mean schedule\?"),
    "tensor_parallel": (ours("tp_size: 2", "tensor_parallel:", "  exprts: whole"), 9, r"^tensor_parallel\.exprts: .*mean experts\?"),
    "data_parallel": (ours("data_parallel:", "  bucket_cap: 25"), 8, r"^data_parallel\.bucket_cap: .*mean bucket_cap_mb\?"),
    "zero": (ours("zero:", "  stagge: 1"), 8, r"^zero\.stagge: .*Did you mean stage\?"),
    "activation_checkpointing": (ours("activation_checkpointing:", "  evry: 1"), 8, r"checkpointing\.evry: .*mean every\?"),
    "gradient_compression": (ours("gradient_compression:", "  methd: int8"), 8, r"compression\.methd: .*mean method\?"),
    "local_sgd": (ours("local_sgd:", "  sync_evry: 8"), 8, r"^local_sgd\.sync_evry: .*Did you mean sync_every\?"),
    "checkpoint": (ours("checkpoint:", "  async: true"), 8, r"^checkpoint\.async: .*Did you mean checkpoint\.async_save\?"),
    "another form of the word": (ours("checkpoint:", "  asynchronous: true"), 8, r"^checkpoint\.asynchronous: .*Did you mean async_save\?"),
    "monitor": (ours("monitor:", "  hang_timeout: 60"), 8, r"^monitor\.hang_timeout: .*Did you mean hang_timeout_s\?"),
    "capitals of a key": (ours("PP_SIZE: 2"), 7, r"^PP_SIZE: unknown key\. Did you mean pp_size\?"),
    "a dash": (ours("pp-size: 2"), 7, r"^pp-size: unknown key\. Did you mean pp_size\?"),
    "a character that is not seen": (ours("pp\u200bsize: 2"), 6, r"^pp\\u200bsize: unknown key\. Did you mean pp_size\?"),
    # words
    "powersgdd": (ours("gradient_compression:", "  method: powersgdd"), 8, r"method='powersgdd': .*to 'powersgd'\.$"),
    "a schedule": (ours("pp_size: 2", "pipeline:", "  schedule: zvb"), 9, r"schedule='zvb': .*to 'zbv_zero_bubble'\.$"),
    "megatron's chunks": (ours("pp_size: 2", "num_layers_per_virtual_pipeline_stage: 2"), 8, r"Did you mean pipeline\.stages_per_rank\?"),
    "megatron's rows": (ours("micro_batch_size: 1"), 7, r"^micro_batch_size: unknown key\. It is per_device_train_batch_size of"),
    "torchtitan's degree": (ours("pipeline_parallel_degree: 2"), 7, r"Did you mean pp_size\?"),
    "deepspeed's bucket": (ours("zero:", "  stage: 2", "  reduce_bucket_size: 5e8"), 9, r"Did you mean data_parallel\.bucket_cap_mb\?"),
    "axolotl's length": (ours("sequence_len: 2048"), 7, r"^sequence_len: unknown key\. It is the script's"),
    "ours in ours": (ours("pp_size: 2", "hf_parallel:", "  tp_size: 2"), 8, r"^hf_parallel: unknown key\. Write its keys one level up"),
    "all blocks": (ours("activation_checkpointing: {every: all}"), 7, r"every='all': .*Set activation_checkpointing\.every to 1\.$"),
    "true for a backend": (ours("pp_size: 2", "pipeline: {compile_blocks: true}"), 8, r"compile_blocks=true: .*to 'inductor'\.$"),
    "two equals signs": (ours("pp_size=2", "tp_size=2"), 6, r"expected a mapping, or auto\. Write a line for each key, with a colon"),
    "the section misspelt": (f"{HEAD}paralelism_config:\n  hf_parallel: {{}}\n", 5, r"^paralelism_config: .*Did you mean parallelism_config\?"),
    "an address of a page": (around("num_machines: 2\nmain_process_ip: http://10.0.0.1/"), 6, r"^main_process_ip='http://10\.0\.0\.1/': expected a name .*to 10\.0\.0\.1\.$"),
    "gpu for cpu": (ours("zero:", "  stage: 1", "  offload_optimizer: gpu"), 9, r"offload_optimizer='gpu': .*to 'cpu'\.$"),
    "true for cpu": (ours("zero:", "  stage: 1", "  offload_optimizer: true"), 9, r"offload_optimizer=true: .*to 'cpu'\.$"),
    "capitals": (ours("zero:", "  engine: FSDP2", "  stage: 3"), 8, r"engine='FSDP2': .*to 'fsdp2'\.$"),
    "yes": (ours("tp_size: 2", "tensor_parallel:", "  sequence_parallel: 'yes'"), 9, r"sequence_parallel='yes': .*to true\.$"),
    "use_cpu: 'yes'": (instead("use_cpu: true", "use_cpu: 'yes'"), 4, r"^use_cpu='yes': expected true or false.*to true\.$"),
    "use_cpu: 'no'": (instead("use_cpu: true", "use_cpu: 'no'"), 4, r"^use_cpu='no': expected true or false.*to false\.$"),
    "mixed_precision: no": (around("mixed_precision: no"), 5, r"^mixed_precision=false: .*Write mixed_precision: 'no'"),
    "half": (around("mixed_precision: bfloat16"), 5, r"^mixed_precision='bfloat16': expected one of .*Set mixed_precision to bf16"),
    "MULTIGPU": (instead("MULTI_GPU", "MULTIGPU"), 2, r"^distributed_type='MULTIGPU': .*Set distributed_type to MULTI_GPU"),
    "MULTI_CPU": (instead("MULTI_GPU", "MULTI_CPU"), 2, r"^distributed_type='MULTI_CPU': .*ONE process.*to MULTI_GPU"),
    "SAGEMAKER": (instead("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), 1, r"^compute_environment='AMAZON_SAGEMAKER': .*to LOCAL_MACHINE"),
    # numbers
    "stage 4": (ours("zero:", "  stage: 4"), 8, r"^zero\.stage=4: expected an integer from 0 to 3\. Set zero\.stage to 3\.$"),
    "a size below 1": (ours("pp_size: -2"), 7, r"^pp_size=-2: expected .*Set pp_size to 1\.$"),
    "half a stage": (ours("pp_size: 2.5"), 7, r"^pp_size=2\.5: expected .*Set pp_size to 2\.$"),
    "a truth for a number": (ours("pp_size: true"), 7, r"^pp_size=true: expected .*an integer of 1 or more"),
    "a word for a number": (ours("pp_size: two"), 7, r"^pp_size='two': expected .*an integer of 1 or more"),
    "no time to wait": (ours("monitor:", "  hang_timeout_s: 0"), 8, r"hang_timeout_s=0: expected seconds above 0.*to 600"),
    "every 0": (ours("activation_checkpointing:", "  every: 0"), 8, r"every=0: .*Set activation_checkpointing\.every to 1\.$"),
    "accumulation 0": (ours("gradient_accumulation_steps: 0"), 7, r"accumulation_steps=0: .*Set gradient_accumulation_steps to 1\.$"),
    "too much warm-up": (ours("gradient_compression:", "  method: powersgd", "  warmup_ratio: 1.5"), 9, r"warmup_ratio=1\.5: .*to below 1"),
    "processes in quotes": (instead("num_processes: 4", "num_processes: '4'"), 3, r"^num_processes='4': .*Set num_processes to 4, a number without"),
    "half a machine": (around("num_machines: 1.5"), 5, r"^num_machines=1\.5: .*Set num_machines to 2, a whole number"),
    "no processes": (instead("num_processes: 4", "num_processes: null"), 3, r"^num_processes=null: expected an integer"),
    "a port": (around("main_process_port: 99999"), 5, r"^main_process_port=99999: .*from 0 to 65535\. Set .*to 29500"),
    "an equals sign": (ours("pp_size = 2"), 6, r"expected a mapping, or auto\. Write pp_size: 2 with a colon\.$"),
    "a comma after a number": (ours("pp_size: 2,"), 7, r"^pp_size='2,': .*Set pp_size to 2\.$"),
    "a list of one number": (ours("zero:", "  stage: [1]"), 8, r"^zero\.stage=\[1\]: .*Set zero\.stage to 1\.$"),
    "no time at all": (ours("monitor:", "  hang_timeout_s: .nan"), 8, r"hang_timeout_s=nan: .*to 600"),
    "machines not known": (around("num_machines: ~"), 5, r"^num_machines=null: .*Set num_machines to a number\.$"),
    "a variable for machines": (around("num_machines: $SLURM_NNODES\nmain_process_ip: a"), 5, r"^num_machines='\$SLURM_NNODES': expected an integer"),
    "GPUs in a list": (around("gpu_ids: [0, 1]"), 5, r"^gpu_ids=\[0, 1\]: expected all.*Set gpu_ids to '0,1'\.$"),
    "one GPU": (around("gpu_ids: 0"), 5, r"^gpu_ids=0: expected all.*Set gpu_ids to '0'\.$"),
    "another program's name for the method": (ours("pp_size: 2", "gradient_compression: {codec: powersgd}"), 8, r"^gradient_compression\.codec: unknown key\. Did you mean gradient_compression\.method\?"),
    "a part of a key": (ours("pp_size: 2", "gradient_compression: {method: powersgd, rank: 2}"), 8, r"rank: unknown key\. Did you mean gradient_compression\.matrix_approximation_rank\?"),
    "a part of two keys": (ours("zero: {stage: 1, offload: cpu}"), 7, r"^zero\.offload: unknown key\. Did you mean zero\.offload_optimizer or zero\.offload_param\?"),
    "a part of a section": (ours("pp_size: 2", "compression: powersgd"), 8, r"^compression: unknown key\. Did you mean gradient_compression\?"),
    "a step for a list of steps": (ours("pp_size: 2", "monitor: {trace_steps: 3}"), 8, r"^monitor\.trace_steps=3: .*Set monitor\.trace_steps to \[3\]\.$"),
    "yes in a sentence": (ours("pp_size: 2", "monitor: {report: yes please}"), 8, r"^monitor\.report='yes please': .*Set monitor\.report to true\.$"),
    "eight bits": (instead("use_cpu: true", "mixed_precision: fp8"), 4, r"^mixed_precision='fp8' is not available beside .*Set mixed_precision to bf16"),
    "how many to keep": (ours("pp_size: 2", "checkpoint: {keep: 2}"), 8, r"^checkpoint\.keep: unknown key\. It is save_total_limit of TrainingArguments\."),
    "one machine that is not the first": (around("num_machines: 1\nmachine_rank: 3"), 6, r"^machine_rank=3 with num_machines=1: the only machine is 0\. Set machine_rank to 0, or"),
    "stage 3 with stages": (ours("pp_size: 2", "zero: {stage: 3}"), 8, r"^zero\.stage=3 with pp_size=2: .*Set zero\.stage to 1, or pp_size to 1\.$"),
    "a compiler misspelt": (around("dynamo_backend: inducter"), 5, r"^dynamo_backend='inducter': expected one of no, inductor, aot_eager\. Set dynamo_backend to inductor\.$"),
    "a compiler that is none for blocks": (around("dynamo_config: {backend: cudagraphs}"), 5, r"^dynamo_config\.backend='cudagraphs': expected one of no, inductor, aot_eager\."),
    "a compiler of no": (around("dynamo_backend: no"), 5, r"^dynamo_backend=false: .*Write dynamo_backend: 'no', in quotes"),
    "how to compile, misspelt": (around("dynamo_config:\n  dynamo_bakend: inductor"), 6, r"^dynamo_config\.dynamo_bakend: unknown key, which accelerate drops.*mean dynamo_backend\?"),
    "a mode misspelt": (around("dynamo_config: {mode: max-autotun}"), 5, r"^dynamo_config\.mode='max-autotun': expected .*Set dynamo_config\.mode to max-autotune\.$"),
    "a mode that blocks do not have": (around("dynamo_config: {dynamo_backend: inductor, dynamo_mode: max-autotune}"), 5, r"^dynamo_config\.dynamo_mode='max-autotune' has no effect on blocks.*Remove dynamo_config\.dynamo_mode\.$"),
    "one graph": (around("dynamo_config: {dynamo_backend: inductor, dynamo_use_fullgraph: true}"), 5, r"^dynamo_config\.dynamo_use_fullgraph=true has no effect on blocks"),
    "shapes in quotes": (around("dynamo_config: {dynamo_use_dynamic: 'no'}"), 5, r"^dynamo_config\.dynamo_use_dynamic='no': expected true or false.*to false\.$"),
    "a section of ours in a section": (ours("pp_size: 2", "dynamo_backend: inductor"), 8, r"^dynamo_backend: unknown key\. Did you mean pipeline\.compile_blocks\?"),
    # what does not fit together
    "a port in the address": (around("num_machines: 2\nmain_process_ip: 10.0.0.1:29500"), 6, r"^main_process_ip='10\.0\.0\.1:29500': .*to 10\.0\.0\.1, and main_process_port to 29500"),
    "addresses of all": (around("num_machines: 2\nmain_process_ip: [a, b]"), 6, r"^main_process_ip=\['a', 'b'\]: expected one name.*that of machine 0"),
    "an address that is a number": (around("num_machines: 2\nmain_process_ip: 10"), 6, r"^main_process_ip=10: expected one name"),
    "an address that is a variable": (around("num_machines: 2\nmain_process_ip: $HEAD"), 6, r"^main_process_ip='\$HEAD': YAML replaces no variables"),
    "its own address": (around("num_machines: 2\nmain_process_ip: localhost"), 6, r"^main_process_ip='localhost' with .*would wait for itself"),
    "its number in quotes": (around("num_machines: 2\nmain_process_ip: a\nmachine_rank: '1'"), 7, r"^machine_rank='1' with .*to 1, without quotes\.$"),
    "machines that do not divide": (around("num_machines: 3\nmain_process_ip: a"), 3, r"^num_processes=4 with num_machines=3: .*to 3 or 6"),
    "stages that do not divide": (ours("pp_size: 3"), 3, r"^num_processes=4 is not a multiple of .*Set num_processes to 3 or 6"),
    "one replica": (ours("pp_size: 4", "zero: {stage: 1}"), 8, r"^zero\.stage=1 with num_processes=4.*Set zero\.stage to 0"),
    "a split": (ours("pp_size: 2", "pipeline:", "  split: [4, 4, 4]"), 9, r"split=\[4, 4, 4\] has 3 entries.*set pp_size to 3"),
    "without effect": (ours("pipeline:", "  schedule: gpipe"), 8, r"^pipeline\.schedule='gpipe' with pp_size=1 has no effect"),
    "machines without an address": (around("num_machines: 2"), 5, r"^num_machines=2 without main_process_ip: .*machine 0"),
    "machines without a port": (around("num_machines: 2\nmain_process_ip: a\nmain_process_port: 0"), 7, r"^main_process_port=0 with .*to 29500"),
    "a machine too many": (around("num_machines: 2\nmain_process_ip: a\nmachine_rank: 2"), 7, r"^machine_rank=2 with .*Set machine_rank to 1"),
    "tp over machines": (ours("tp_size: 4", head=HEAD + "num_machines: 2\nmain_process_ip: a\n"), 9, r"^tp_size=4 with .*Set tp_size to 2"),
    "accelerate's sizes beside ours": (
        HEAD + OURS + "    pp_size: 2\n  parallelism_config_tp_size: 2\n", 8, r"parallelism_config_tp_size=2 beside .*Remove it"),
}  # fmt: skip


def findings(tmp_path: Path, content: str) -> list[Finding]:
    path = tmp_path / "mine.yaml"
    path.write_text(content, encoding="utf-8")
    return list(check_file(path, Machine((), 64 * 10**9)).findings)


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_is_named_in_its_line_with_its_fix(name: str, tmp_path: Path) -> None:
    content, line, says = BROKEN[name]
    [error] = [finding for finding in findings(tmp_path, content) if finding.severity == "error"]
    assert re.search(says, error.message), error.message
    assert error.line == line, str(error)
    assert "\n" not in error.message


def test_one_microbatch_with_stages_is_a_warning(tmp_path: Path) -> None:
    [warning] = findings(tmp_path, ours("pp_size: 2", "pipeline: {num_microbatches: 1}"))
    assert (warning.severity, warning.line) == ("warning", 8)
    assert "50% of the step is idle. Set pipeline.num_microbatches to 4" in warning.message
    assert findings(tmp_path, ours("pp_size: 2", "pipeline: {num_microbatches: 1, schedule: naive}")) == []


def test_problems_stand_in_the_order_of_their_lines(tmp_path: Path) -> None:
    content = ours("pp_sise: 2", "tp_size: 0", head=HEAD.replace("num_processes: 4", "num_processes: four"))
    found = findings(tmp_path, content)
    assert [finding.line for finding in found] == [3, 7, 8]


def test_a_section_that_is_not_found_hides_no_other_problem(tmp_path: Path) -> None:
    content = "compute_enviroment: LOCAL_MACHINE\ndistributed_type: MULTIGPU\nnum_process: 4\nparalelism_config:\n  hf_parallel: {}\n"
    found = findings(tmp_path, content)
    assert [finding.line for finding in found] == [1, 2, 3, 4]
    assert all("Did you mean" in found[index].message for index in (0, 2, 3))


# Content below the usual head -> line and message of each problem.
SEVERAL: dict[str, tuple[str, list[tuple[int, str]]]] = {
    "our section misspelt": (
        "parallelism_config:\n  hf_paralel:\n    pp_sise: 2\n    pipline: {shedule: 1f1b}\n",
        [(6, r"hf_paralel: unknown key"), (7, r"^pp_sise: .*mean pp_size\?"), (8, r"^pipline: .*mean pipeline\?")]
        + [(8, r"^pipline\.shedule: .*mean schedule\?")],
    ),
    "the section around it misspelt": (
        "paralelism_config:\n  hf_parallel:\n    zero: {stage: 4}\n",
        [(5, r"^paralelism_config: unknown key"), (7, r"^zero\.stage=4: .*Set zero\.stage to 3")],
    ),
    "our section at the top": (
        "hf_parallel:\n  pp_size: 3\n",
        [(3, r"^num_processes=4 is not a multiple of"), (5, r"^hf_parallel: the settings stand in")],
    ),
    "a section of ours misspelt": (
        "parallelism_config:\n  hf_parallel:\n    pp_size: 2\n    pipline:\n      schedule: zvb\n      num_microbatches: -1\n",
        [(8, r"^pipline: unknown key\. Did you mean pipeline\?"), (9, r"^pipline\.schedule='zvb': .*to 'zbv_zero_bubble'")]
        + [(10, r"^pipline\.num_microbatches=-1: .*Set pipeline\.num_microbatches to 1")],
    ),
    "a compiler, nothing in our section, a section beside it": (
        "dynamo_backend: inducter\nparallelism_config:\n  hf_parallel:\n  pipline:\n    shedule: 1f1b\n",
        [(5, r"^dynamo_backend='inducter': .*to inductor"), (7, r"hf_parallel: nothing is written in it, .*Write settings below it")]
        + [(8, r"^parallelism_config\.pipline=.*no effect\. Indent it below hf_parallel, as hf_parallel\.pipeline\.$")]
        + [(9, r"^pipline\.shedule: unknown key\. Did you mean schedule\?")],
    ),
    "keys that are not indented": (
        "parallelism_config:\n  hf_parallel:\n  pp_size: 2\n  zero: {stage: 5}\n",
        [(6, r"nothing is written in it"), (7, r"pp_size=2 beside .*Indent it below"), (8, r"parallelism_config\.zero=.*as hf_parallel\.zero\.$")]
        + [(8, r"^zero\.stage=5: .*Set zero\.stage to 3")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_the_problems_behind_a_problem_are_named_with_it(name: str, tmp_path: Path) -> None:
    content, expected = SEVERAL[name]
    found = sorted(findings(tmp_path, HEAD + content), key=lambda finding: finding.line or 0)
    assert [finding.line for finding in found] == [line for line, _ in expected], [str(finding) for finding in found]
    left = list(found)
    for line, says in expected:
        [one] = [finding for finding in left if finding.line == line and re.search(says, finding.message)]
        left.remove(one)


@pytest.mark.parametrize("nothing", ["", " null"])
def test_a_section_of_nothing_is_a_warning_in_its_line(nothing: str, tmp_path: Path) -> None:
    [warning] = findings(tmp_path, f"{HEAD}parallelism_config:\n  hf_parallel:{nothing}\n")
    assert (warning.severity, warning.line) == ("warning", 6)
    assert re.search(
        r"nothing is written in it, so hf_parallel only copies the model\. Write .*pp_size: 2", warning.message
    )


def test_what_compiles_blocks_is_no_mistake(tmp_path: Path) -> None:
    for line in ("dynamo_backend: INDUCTOR", "dynamo_backend: 'no'", "dynamo_config: {dynamo_backend: aot_eager}"):
        assert findings(tmp_path, around(line)) == []


def test_the_file_that_all_of_these_break_is_right(tmp_path: Path) -> None:
    assert findings(tmp_path, ours("pp_size: 2")) == []
    assert findings(tmp_path, ours("pp_size: '2'")) == []  # a number in quotes is that number
    several = HEAD + "num_machines: 2\nmachine_rank: 1\nmain_process_ip: a\nmain_process_port: 29500\n"
    assert findings(tmp_path, ours("tp_size: 2", head=several)) == []


def test_a_file_that_is_not_there_is_said_to_be_missing() -> None:
    result = CliRunner().invoke(app, ["validate", "/nowhere/none.yaml"])
    assert result.exit_code == 1
    assert "'/nowhere/none.yaml': this file does not exist." in result.output.replace("\n", "")
    long = CliRunner().invoke(app, ["validate", f"/{'deep' * 40}/none.yaml"]).output.replace("\n", "")
    assert re.search(r"'\.\.\.p(deep)+/none\.yaml': this file does not exist\.", long)
    assert "Did you mean cpu_pp2?" in CliRunner().invoke(app, ["validate", "cpu_pp3"]).output


@pytest.mark.parametrize(
    ("short", "full"),
    [("zb", "interleaved_zero_bubble"), ("zbv", "zbv_zero_bubble"), ("interleaved", "interleaved_1f1b")],
)
def test_short_names_of_schedules_are_their_full_names(short: str, full: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(ours("pp_size: 2", f"pipeline: {{schedule: {short}}}"))
    assert load_recipe(path).pipeline.schedule == full
