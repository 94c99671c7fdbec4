"""Looking keys up in the nested dictionaries of a `config.json`.

Owns: `Reading`, what was read and from where; `Scopes`, the order in which places are searched. A nested place comes
before the top level, key by key, and a null counts as absent.

Does not know: any layout.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dflash.draft.configuration_dflash import find_problems


@dataclass
class Reading:
    """What was read from one `config.json`.

    values: canonical keys to values, not yet checked.
    places: canonical keys to where the value stood, or to where it was looked for.
    problems: what was seen while reading and cannot be honored.
    warnings: what is odd but works.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def all_problems(self) -> list[str]:
        """What was seen while reading, then what is wrong with the values themselves."""
        return [*self.problems, *find_problems(self.values, self.places)]


class Scopes:
    """Pairs of a prefix for messages ("dflash_config.") and a dictionary; the first that has a key wins.

    asked: all published names that were looked for.
    """

    def __init__(self, reading: Reading, pairs: Iterable[tuple[str, Mapping]]) -> None:
        self.reading = reading
        self.pairs = list(pairs)
        self.asked: set[str] = set()

    def take(self, keys: Iterable[str]) -> None:
        """Reads keys that are published under their canonical names."""
        for key in keys:
            self.take_as(key, key)

    def take_as(self, canonical: str, *published: str) -> Any:
        """Reads a canonical key from the first place that has one of its published names; returns the value or None."""
        self.asked.update(published)
        for name in published:
            for prefix, mapping in self.pairs:
                if mapping.get(name) is not None:
                    self.reading.values[canonical] = mapping[name]
                    self.reading.places[canonical] = spoken(prefix, name)
                    return mapping[name]
        looked = " and ".join(spoken(prefix, name) for name in published for prefix, _ in self.pairs)
        self.reading.places.setdefault(canonical, looked)
        return None


def spoken(prefix: str, key: str) -> str:
    """A place as messages name it: `dflash_config.block_size`, or `block_size` (top level)."""
    return f"`{prefix}{key}`" if prefix else f"`{key}` (top level)"


def submapping(raw: Mapping, key: str) -> Mapping:
    """The dictionary under a key; an empty one where there is none."""
    value = raw.get(key)
    return value if isinstance(value, Mapping) else {}


def architectures(raw: Mapping) -> list[str]:
    """The names under `architectures`, as far as they are names."""
    names = raw.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
