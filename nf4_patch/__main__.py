"""Run ``nf4-patch`` as ``python -m nf4_patch``."""

from .tools.cli import main

if __name__ == "__main__":
    main()
