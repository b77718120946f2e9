"""accelerate's FSDP without a GPU, over gloo: torchrun fsdp_on_cpu.py CONFIG.yaml SCRIPT ARGUMENTS.

accelerate reads an FSDP configuration for GPUs only. Here its variables are set from the file, as `accelerate launch`
sets them, and the Accelerator is told to be an FSDP one; what it then wraps and trains is its own.
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
