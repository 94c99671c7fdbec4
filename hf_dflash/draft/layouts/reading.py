"""Looks up keys in the nested dictionaries of a `config.json`, whatever its layout.

For each key, a nested dictionary takes precedence over the top level, and a null counts as absent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dflash.draft.configuration_dflash import find_problems


@dataclass
class Reading:
    """What was read from one `config.json`.

    values: canonical keys to values, not yet checked.
    places: canonical keys to where the value was read from or looked for.
    problems: found while reading; these prevent loading.
    warnings: unusual but usable.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def all_problems(self) -> list[str]:
        """Return the problems found while reading, then those of the values themselves."""
        return [*self.problems, *find_problems(self.values, self.places)]


class Scopes:
    """Pairs of a prefix for messages ("dflash_config.") and a dictionary; the first that has a key wins.

    requested: all published names that were looked up.
    """

    def __init__(self, reading: Reading, pairs: Iterable[tuple[str, Mapping]]) -> None:
        self.reading = reading
        self.pairs = list(pairs)
        self.requested: set[str] = set()

    def take(self, keys: Iterable[str]) -> None:
        """Read keys that are published under their canonical names."""
        for key in keys:
            self.take_as(key, key)

    def take_as(self, canonical: str, *published: str) -> Any:
        """Read a canonical key from the first place that has one of its published names; return the value or None."""
        self.requested.update(published)
        for name in published:
            for prefix, mapping in self.pairs:
                if mapping.get(name) is not None:
                    self.reading.values[canonical] = mapping[name]
                    self.reading.places[canonical] = format_place(prefix, name)
                    return mapping[name]
        looked = " and ".join(format_place(prefix, name) for name in published for prefix, _ in self.pairs)
        self.reading.places.setdefault(canonical, looked)
        return None


def format_place(prefix: str, key: str) -> str:
    """Format a place for messages: `dflash_config.block_size`, or `block_size` (top level)."""
    return f"`{prefix}{key}`" if prefix else f"`{key}` (top level)"


def submapping(raw: Mapping, key: str) -> Mapping:
    """Return the dictionary under a key, or an empty one if there is none."""
    value = raw.get(key)
    return value if isinstance(value, Mapping) else {}


def architectures(raw: Mapping) -> list[str]:
    """Return the strings under `architectures`."""
    names = raw.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
