"""The version of shardio, which pyproject.toml reads from here, and those of what is installed."""

from contextlib import suppress

__version__ = "0.2.0.dev0"


def installed(*names: str) -> dict[str, str]:
    """Return the versions of the named distributions, by name, without those that are missing."""
    from importlib import metadata

    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
