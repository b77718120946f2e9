"""``python -m nf4_patch`` is ``nf4-patch``."""

from .tools.cli import main

if __name__ == "__main__":
    main()
