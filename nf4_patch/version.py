"""The version of nf4_patch. This module imports no other module of the package, so every module may import it."""

__version__ = "0.1.0"


def release_of(distribution: str) -> str | None:
    """Return the installed release of a distribution, or None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
