"""The patch in the real unsloth_zoo's decode of expert stacks: bits, fallbacks, compiled calls.

Without a GPU unsloth_zoo's own kernel runs under Triton's interpreter too, its check for a GPU switched off.
"""

from __future__ import annotations

from unsloth_releases import RELEASES, with_unsloth


@RELEASES
def test_unsloth_zoo(release, tmp_path):
    assert "state patched" in with_unsloth(release, tmp_path, "unsloth_experts")
