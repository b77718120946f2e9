"""The version, below everything that names it."""

__version__ = "0.1.0"


def release_of(distribution: str) -> str | None:
    """What is installed of it; None: nothing."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
