"""nox -s releases: the whole release matrix. nox -s torch: other releases of torch, each a download of gigabytes."""

import nox

nox.options.sessions = ["light"]
PYTHON = "3.11"
TORCH = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.13.0")
LIBRARIES = ("bitsandbytes>=0.50", "transformers>=5,<5.18", "peft", "accelerate", "datasets>=4,<5", "pillow")
LIGHT = ("installed", "lowest", "bitsandbytes 0.48.2", "wrapt 1.16.0", "unsloth 2026.9.7")


def environment(session: nox.Session, torch: str = "torch") -> None:
    session.install(torch, *LIBRARIES, "-e", ".[test]")
    session.install("--no-deps", "unsloth==2026.10.9", "unsloth_zoo==2026.10.9", "trl==1.15.0")


@nox.session(python=PYTHON)
def releases(session: nox.Session) -> None:
    """Every cell of scripts/release_matrix.py, or the ones that are named after `--`; writes docs/data/releases.json."""
    environment(session)
    session.run("python", "scripts/release_matrix.py", *session.posargs)


@nox.session(python=PYTHON)
def light(session: nox.Session) -> None:
    """The selection for every push: one release on each side of every change that the patch adapts to."""
    environment(session)
    session.run("python", "scripts/release_matrix.py", *LIGHT)


@nox.session(python=PYTHON)
@nox.parametrize("torch", TORCH)
def torch(session: nox.Session, torch: str) -> None:
    """The tests and the installed cell under one release of torch and the Triton that it pins."""
    environment(session, f"torch=={torch}")
    session.run(
        "python",
        "-m",
        "pytest",
        "tests/nf4/test_kernels.py",
        "tests/patching/test_patching.py",
        "tests/patching/test_switch.py",
        "tests/tools/test_fuzz.py",
        "tests/patching/test_compile.py",
        "tests/integration/test_releases.py::test_a_garbage_collection_leaves_the_cached_weights",
    )
    session.run("python", "scripts/release_matrix.py", "--as", f"torch {torch}", "installed")
