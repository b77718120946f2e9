"""nox -s releases: the whole release matrix. nox -s torch: other releases of torch, each a download of gigabytes."""

import nox

nox.options.sessions = ["light"]
PYTHON, PYTHONS = "3.11", ("3.10", "3.11", "3.12", "3.13")
TORCH = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.13.0", "2.14.1")
RELEASES = "tests/releases.txt"  # as scripts/test
LIGHT = ("installed", "lowest", "bitsandbytes 0.48.2", "wrapt 1.16.0", "unsloth 2026.9.7")


def matrix(session: nox.Session, *cells: str, torch: str = "torch") -> None:
    """Cells of scripts/release_matrix.py, which runs the tests and writes docs/data/releases.json."""
    session.install(torch, "-c", RELEASES, "-e", ".[test]")
    session.install("--no-deps", "-r", RELEASES)
    session.run("python", "scripts/release_matrix.py", *cells)


@nox.session(python=PYTHON)
def releases(session: nox.Session) -> None:
    """Every cell, or the ones that are named after `--`."""
    matrix(session, *session.posargs)


@nox.session(python=PYTHON)
def light(session: nox.Session) -> None:
    """The selection for every push: one release on each side of every change that the patch adapts to."""
    matrix(session, *LIGHT)


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """The installed cell under every Python of the classifiers; one that is not on this machine is skipped."""
    matrix(session, "--as", f"Python {session.python}", "installed")


@nox.session(python=PYTHON)
@nox.parametrize("torch", TORCH)
def torch(session: nox.Session, torch: str) -> None:
    """The installed cell under one release of torch and the Triton that it pins."""
    matrix(session, "--as", f"torch {torch}", "installed", torch=f"torch=={torch}")
