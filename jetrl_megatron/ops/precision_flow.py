"""Precision-flow graphs and their comparison (Jet-RL, section 4): rollout must be a subgraph of the training forward.

A graph is the list of executed operators in flow order, each at its canonical (Hugging Face) module with the precision
of every tensor that enters it, leaves it or exists inside it. Training holds the rollout's nodes, and besides them
saved activations and the backward. Nothing here knows layers or families by name: modules are strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from jetrl_megatron.fp8.recorder import Edge, Node, Role

SCHEMA = "jetrl-precision-flow/1"
HEAD = "lm_head"  # what runs after the last module: lm_head and log-probs
EXPERTS = ".experts"  # ends the name of a module that holds the experts of a layer
COMPARED: tuple[Role, ...] = ("input", "internal", "output")
ABSENT = "absent"
_ROLE_WORDS: dict[Role, str] = {"input": "entering", "internal": "inside", "output": "leaving"}
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Graph:
    """side: `training`, `prefill`, `decode`, or such a name with the rank it was recorded on."""

    side: str
    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, side: str, nodes: Sequence[Node]) -> Graph:
        return cls(side, tuple(replace(node, module=node.module or HEAD) for node in nodes))

    @classmethod
    def merged(cls, side: str, stages: Sequence[Graph]) -> Graph:
        """Pipeline stages, first to last: their forward in this order, their backward in the opposite one."""
        forward = [node for stage in stages for node in stage.nodes if node.phase == "forward"]
        rest = [node for stage in reversed(stages) for node in stage.nodes if node.phase != "forward"]
        return cls(side, (*forward, *rest))

    def forward(self) -> dict[str, list[Node]]:
        """The forward nodes of every module, modules in flow order; experts that run one after the other count once."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.phase == "forward":
                found.setdefault(node.module, []).append(node)
        return {module: once(nodes) if module.endswith(EXPERTS) else nodes for module, nodes in found.items()}

    def to_json(self) -> dict[str, Any]:
        """See docs/precision_flow.md for the fields."""
        return {"schema": SCHEMA, "side": self.side, "nodes": [asdict(node) for node in self.nodes]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Graph:
        """Raises ValueError for another schema."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema: {data.get('schema')!r}; rule: {SCHEMA}; fix: record the graph with this version")
        nodes = [Node(**{**n, "edges": tuple(Edge(**edge) for edge in n["edges"])}) for n in data["nodes"]]
        return cls(data["side"], tuple(nodes))


def once(nodes: list[Node]) -> list[Node]:
    """One period of nodes that repeat (abcabc -> abc), else without immediate repetitions (abccc -> abc)."""
    for period in range(1, len(nodes)):
        if len(nodes) % period == 0 and nodes == nodes[:period] * (len(nodes) // period):
            return nodes[:period]
    return [node for i, node in enumerate(nodes) if i == 0 or node != nodes[i - 1]]


@dataclass(frozen=True)
class Difference:
    """One edge, or (edge None) one operator, that is not the same in two graphs. found: on either side, in words."""

    module: str
    operator: str
    edge: str | None
    sides: tuple[str, str]
    found: tuple[str, str]


def compare(first: Graph, second: Graph) -> list[Difference]:
    """Differences of the forward graphs; empty if every module runs the same operators in the same order with the same
    precision on every edge.

    Saved activations and other phases are not compared: they are what training may have more. An operator that only one
    side runs is a difference in either direction: a model that leaves an operator out is another function."""
    a, b = first.forward(), second.forward()
    found: list[Difference] = []
    for module in dict.fromkeys([*a, *b]):
        for left, right in aligned(a.get(module, []), b.get(module, [])):
            found += _node_differences(module, left, right, (first.side, second.side))
    return found


def aligned(a: Sequence[Node], b: Sequence[Node]) -> Iterator[tuple[Node | None, Node | None]]:
    """Pairs of nodes of one module, matched by operator; None where a side has no counterpart."""
    matcher = SequenceMatcher(None, [n.operator for n in a], [n.operator for n in b], autojunk=False)
    for _, a_from, a_to, b_from, b_to in matcher.get_opcodes():
        yield from zip_longest(a[a_from:a_to], b[b_from:b_to])


def _node_differences(
    module: str, left: Node | None, right: Node | None, sides: tuple[str, str]
) -> Iterator[Difference]:
    if left is None or right is None or left.operator != right.operator:
        names = tuple(node.operator if node is not None else ABSENT for node in (left, right))
        yield Difference(module, "", None, sides, (names[0], names[1]))
    if left is None or right is None:
        return
    operator = " or ".join(dict.fromkeys((left.operator, right.operator)))
    edges = [_precisions(node) for node in (left, right)]
    for role, tensor in dict.fromkeys([*edges[0], *edges[1]]):
        found = tuple(side.get((role, tensor), ()) for side in edges)
        if found[0] != found[1]:
            name = f"{tensor} {_ROLE_WORDS[role]}"
            yield Difference(module, operator, name, sides, (_words(found[0]), _words(found[1])))


def same_precision(node: Node, other: Node, edge: Edge) -> bool:
    """Whether the other node has this node's edges of that name and role."""
    key = (edge.role, edge.tensor)
    return _precisions(node).get(key) == _precisions(other).get(key)


def _precisions(node: Node) -> dict[tuple[Role, str], tuple[Edge, ...]]:
    found: dict[tuple[Role, str], tuple[Edge, ...]] = {}
    for edge in node.edges_of(*COMPARED):
        found[edge.role, edge.tensor] = (*found.get((edge.role, edge.tensor), ()), edge)
    return found


def _words(edges: Sequence[Edge]) -> str:
    return " and ".join(map(precision_words, edges)) or ABSENT


def precision_words(edge: Edge) -> str:
    """E.g. `bfloat16`, or `float8_e4m3fn 1x128 fp32 amax448-rne`."""
    return " ".join(part for part in edge.precision if part is not None)


def describe(differences: Sequence[Difference]) -> list[str]:
    """One line per difference in words; those that repeat over layers or sides become one line."""
    folded: dict[tuple[str, ...], tuple[dict[str, None], dict[tuple[str, str], None]]] = {}
    for d in differences:
        key = (fold(d.module), d.operator, d.edge or "", *d.found)
        modules, sides = folded.setdefault(key, ({}, {}))
        modules[d.module] = None
        sides[d.sides] = None
    return [_line(key, list(modules), list(sides)) for key, (modules, sides) in folded.items()]


def _line(key: tuple[str, ...], modules: Sequence[str], sides: Sequence[tuple[str, str]]) -> str:
    module, operator, edge, left, right = key
    layers = [int(match[0]) for m in modules if (match := _LAYER.search(m))]
    where = f"{module} (layers {_ranges(layers)})" if layers else module
    left_side = " and ".join(dict.fromkeys(a for a, _ in sides))
    right_side = " and ".join(dict.fromkeys(b for _, b in sides))
    if not edge:
        return f"{where}: the operator is {left} in {left_side}, {right} in {right_side}"
    return f"{where}: {operator}: {edge} is {left} in {left_side}, {right} in {right_side}"


def fold(module: str) -> str:
    """The module's path with `*` for the layer index (its first number)."""
    return _LAYER.sub("*", module, count=1)


def layer_of(module: str) -> int | None:
    match = _LAYER.search(module)
    return int(match[0]) if match else None


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
