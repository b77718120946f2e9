"""Neither the import nor enable() and disable() import torch or print anything."""

import sys
import time

start = time.process_time()
import nf4_patch

elapsed = time.process_time() - start
heavy = {"torch", "triton", "bitsandbytes", "unsloth", "transformers", "wrapt", "click"} & set(sys.modules)
assert not heavy, heavy
assert elapsed < 0.2, elapsed
assert not nf4_patch.is_enabled()
nf4_patch.enable()
assert nf4_patch.is_enabled() and nf4_patch.status().enabled and nf4_patch.status().gpus is None
nf4_patch.disable()
assert "torch" not in sys.modules
