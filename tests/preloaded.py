"""What no rank should do again: the fork server of `rank_runner` imports this module once, and its ranks have it done.

Modules that a first training run imports late (accelerate asks whether a model is DeepSpeed's), and transformers' table of
renamed weights, a thousand compiled patterns. Two things that accelerate does again and again are made cheap: to parse the
metadata of a package each time it asks whether there is one, and to collect garbage among all that was imported after
every training, which is most of such a run of a tiny model. What shapes ops give on `meta` is known from planning two tiny models.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import sys

import tiny
import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hf_parallel.model.probes import Probes
from hf_parallel.pipeline_parallel.plan.discover import discover_stages


MODULES = ("deepspeed", "numpy.ctypeslib", "torch.profiler._cupti_monitor")

# DeepSpeed chooses its accelerator when it is imported, which is not a thing to do beside the stand-in for CUDA.
if "softcuda.devices" not in sys.modules:
    for name in MODULES:
        importlib.import_module(name)
    for model in (tiny.llama(), tiny.gpt2()):
        probes = Probes(model, torch.device("cpu"))
        discover_stages(model, probes.discovery, cost_tokens=probes.cost_tokens)
    del model, probes
get_checkpoint_conversion_mapping("llama")
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
gc.collect()
gc.freeze()  # of the server: its ranks begin with all of it left out of their collections
