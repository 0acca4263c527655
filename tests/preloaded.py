"""What no rank should do again: the fork server of `rank_runner` imports this module once, and its ranks have it done.

Modules that a first training run imports late (accelerate asks whether a model is DeepSpeed's), and transformers' table of
renamed weights, a thousand compiled patterns.
"""

from __future__ import annotations

import importlib
import sys

from transformers.conversion_mapping import get_checkpoint_conversion_mapping


MODULES = ("deepspeed", "numpy.ctypeslib", "torch.profiler._cupti_monitor")

# DeepSpeed chooses its accelerator when it is imported, which is not a thing to do beside the stand-in for CUDA.
for name in MODULES if "softcuda.devices" not in sys.modules else ():
    importlib.import_module(name)
get_checkpoint_conversion_mapping("llama")
