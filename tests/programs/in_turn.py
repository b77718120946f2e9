"""Programs in this process, one after the other: ``in_turn.py "PROGRAM WORDS" ...``."""

import runpy
import sys
from pathlib import Path

for words in sys.argv[1:]:
    name, *sys.argv[1:] = words.split()
    runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
