"""Looks up keys in the nested dictionaries of a `config.json`, whatever its layout.

For each key, a nested dictionary takes precedence over the top level, and a null counts as absent.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dflash.draft.configuration_dflash import MAXIMA, find_problems, format_value, is_integer


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

    def typed(self, raw: Mapping, key: str, accepts: Callable[[Any], bool], needed: str, prefix: str = "") -> Any:
        """Return the value under a key, or None if it is absent; a value of another type is a problem and None too."""
        value = raw.get(key)
        if value is None or accepts(value):
            return value
        found = f"{format_value(value)} ({type(value).__name__})"
        self.problems.append(f"{format_place(prefix, key)} must be {needed} or null; found {found}.")
        return None

    def flag(self, raw: Mapping, key: str, prefix: str = "") -> bool | None:
        """Return the boolean under a key; the string "false" is none."""
        return self.typed(raw, key, lambda value: isinstance(value, bool), "true, false", prefix)

    def mapping(self, raw: Mapping, key: str, prefix: str = "") -> Mapping:
        """Return the dictionary under a key, or an empty one if there is none."""
        return self.typed(raw, key, lambda value: isinstance(value, Mapping), "a mapping", prefix) or {}

    def num_layers(self) -> int | None:
        """Return `num_hidden_layers` if it is valid, so that a list with an entry per layer can be made."""
        layers = self.values.get("num_hidden_layers")
        return layers if is_integer(layers) and 0 < layers <= MAXIMA["num_hidden_layers"] else None


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
