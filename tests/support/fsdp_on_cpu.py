"""accelerate's FSDP without a GPU, over gloo: torchrun fsdp_on_cpu.py CONFIG.yaml SCRIPT ARGUMENTS.

accelerate reads an FSDP configuration only for GPUs. This program sets the same variables from the file as ``accelerate
launch`` does, and makes the Accelerator an FSDP one. accelerate itself then wraps and trains the model.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

for name, value in yaml.safe_load(Path(sys.argv.pop(1)).read_text())["fsdp_config"].items():
    os.environ[name.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
initialize = Accelerator.__init__


def fsdp(self: Accelerator, *args: object, **kwargs: object) -> None:
    initialize(self, *args, **kwargs)
    self.state.device = torch.device("cpu")  # not cpu:0, which FSDP1 takes for another device
    self.state.distributed_type = DistributedType.FSDP
    self.state.fsdp_plugin = FullyShardedDataParallelPlugin()


Accelerator.__init__ = fsdp
runpy.run_path(str(Path(__file__).parents[1] / "programs" / "exit_without_finalization.py"), run_name="__main__")
