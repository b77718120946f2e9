"""The version of nf4_patch. This module imports no other module of the package, so every module may import it."""

__version__ = "0.1.0"


def release_of(distribution: str) -> str | None:
    """Return the installed release of a distribution, or None."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def holds(release: str, condition: str) -> bool:
    """Return whether a release meets a specifier such as ">= 0.50". Every release meets the specifier "".

    A development, post or local release such as "0.50.dev0" counts as its base release. The release "" means not
    installed, and meets no specifier.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return bool(release) and SpecifierSet(condition).contains(Version(release).base_version)
