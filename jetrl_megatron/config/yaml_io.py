"""YAML as this project reads and writes it: safe, duplicate keys refused, `1e-3` is a number."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

# PyYAML follows YAML 1.1, where a float needs a dot: `1e-3` would be text. YAML 1.2 and every user read a number.
_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # an unhashable key is refused by the base class
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} appears twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number, so that every dump loads back equal."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _cls in (_Loader, _Dumper):
    _cls.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def parse_yaml(text: str) -> Any:
    """The one document in `text`. Raises yaml.YAMLError (with `problem_mark`) or ValueError (impossible date)."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


def dump_yaml(value: Any) -> str:
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))
