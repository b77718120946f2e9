"""Call enable() while another thread is in the middle of importing a bitsandbytes that waits at its ``gate``."""

import threading
import gate
import nf4_patch
from nf4_patch.libraries.bitsandbytes import adapters  # torch, now: not while the other waits

importing = threading.Thread(target=__import__, args=("bitsandbytes.functional",))
importing.start()
assert gate.halfway.wait(60)
nf4_patch.enable()
importing.join(60)
states = {t.name: t.state for t in nf4_patch.status().targets}
assert states["bitsandbytes.functional.dequantize_4bit"] == "patched", states
