"""The picture of a precision flow: one self-contained SVG, training beside rollout, equal layers folded into one.

One row per operator of a folded layer. A box lists what is multiplied and what leaves; its frame and the arrow below
it have the colour of their precision; what differs is red. Beside training: what is saved for backward, and the
backward itself. Prefill and decode are drawn once where they agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from jetrl_megatron.fp8.recorder import Edge, Node
from jetrl_megatron.ops.precision_flow import Graph, aligned, compare, fold, layer_of, precision_words, same_precision

COLOURS = {"float8_e4m3fn": "#c26a00", "bfloat16": "#1f5fa8", "float32": "#5b7f2b"}
OTHER, RED, GREY = "#777777", "#d00000", "#666666"
BOX_WIDTH, GAP, LINE, PAD, ARROW = 330, 30, 15, 7, 16
LEFT, TOP = 20, 92

Row = tuple[Node | None, Node | None]


@dataclass(frozen=True)
class Block:
    """Rows of equal layers, or of what is outside the layers. layers: their indices."""

    rows: list[Row]
    backward: dict[str, list[Node]]
    layers: tuple[int, ...]

    @property
    def title(self) -> str:
        if len(self.layers) < 2:
            return "".join(f"layer {layer}" for layer in self.layers)
        return f"layers {self.layers[0]} to {self.layers[-1]} (x {len(self.layers)}, all alike)"


def draw(training: Graph, prefill: Graph, decode: Graph) -> str:
    """SVG text. An operator that one side does not run is an empty place."""
    rollouts = {"rollout (prefill and decode)": prefill}
    if compare(prefill, decode):
        rollouts = {"rollout: prefill": prefill, "rollout: decode": decode}
    parts: list[str] = []
    y = TOP
    for title, rollout in rollouts.items():
        parts += _column_titles(title, y)
        for block in _blocks(training, rollout):
            y = _block(parts, block, y)
        y += TOP // 2
    equal = not any(compare(training, rollout) for rollout in rollouts.values())
    width = LEFT * 2 + 3 * BOX_WIDTH + 2 * GAP
    verdict = "rollout is a subgraph of the training forward" if equal else "rollout is NOT a subgraph: see red"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(LEFT, 26, f"Precision flow: {verdict}", "#000000" if equal else RED, size=16, weight="bold"),
        *_legend(),
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def _legend() -> Iterator[str]:
    x = LEFT
    names = {
        "float8_e4m3fn": "FP8 (scale granularity and format, quantizer)",
        "bfloat16": "BF16",
        "float32": "FP32",
    }
    for dtype, name in names.items():
        yield f'<rect x="{x}" y="41" width="12" height="12" fill="{COLOURS[dtype]}"/>'
        yield _text(x + 17, 51, name, "#000000")
        x += 40 + 7 * len(name)
    yield f'<rect x="{x}" y="41" width="12" height="12" fill="{RED}"/>'
    yield _text(x + 17, 51, "differs", "#000000")


def _column_titles(rollout: str, y: int) -> Iterator[str]:
    for column, title in enumerate(("training: saved for backward, and backward", "training: forward", rollout)):
        yield _text(_x(column), y - 10, title, "#000000", size=13, weight="bold")


def _blocks(training: Graph, rollout: Graph) -> list[Block]:
    """Outside rows and layers in flow order; layers whose rows are the same in both graphs become one block."""
    rows = list(_rows(training, rollout))
    backward: dict[str, list[Node]] = {}
    for node in training.nodes:
        if node.phase == "backward":
            backward.setdefault(node.module, []).append(node)
    blocks: list[Block] = []
    previous: object = None
    for layer, group in _grouped(rows):
        modules = dict.fromkeys(node.module for row in group for node in row if node is not None)
        of_block = {module: backward.get(module, [])[::-1] for module in modules}
        key = None if layer is None else ([tuple(map(_folded, row)) for row in group], _folded_all(of_block))
        if layer is not None and key == previous:
            blocks[-1] = replace(blocks[-1], layers=(*blocks[-1].layers, layer))
        else:
            blocks.append(Block(group, of_block, () if layer is None else (layer,)))
        previous = key
    return blocks


def _rows(training: Graph, rollout: Graph) -> Iterator[Row]:
    """Forward nodes in training's flow order, each with its counterpart."""
    a, b = training.forward(), rollout.forward()
    partner: dict[int, list[Row]] = {}
    order: dict[str, list[Row]] = {m: list(aligned(a.get(m, []), b.get(m, []))) for m in dict.fromkeys([*a, *b])}
    for rows in order.values():
        for row in rows:
            partner.setdefault(id(row[0]), []).append(row)
    for node in training.nodes:
        if node.phase == "forward":
            yield from partner.pop(id(node), [])
    yield from partner.pop(id(None), [])


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[int | None, list[Row]]]:
    group: list[Row] = []
    current: int | None = None
    for row in rows:
        node = row[0] or row[1]
        assert node is not None
        layer = layer_of(node.module)
        if group and layer != current:
            yield current, group
            group = []
        group.append(row)
        current = layer
    if group:
        yield current, group


def _folded(node: Node | None) -> object:
    return None if node is None else (fold(node.module), node.operator, node.edges)


def _folded_all(backward: dict[str, list[Node]]) -> object:
    return [[_folded(node) for node in nodes] for nodes in backward.values()]


def _block(parts: list[str], block: Block, y: int) -> int:
    top = y
    y += PAD + (LINE if block.title else 0)
    backward = {module: list(nodes) for module, nodes in block.backward.items()}
    for row in block.rows:
        y = _row(parts, row, backward, y)
    if block.title:
        width = 3 * BOX_WIDTH + 2 * GAP + 2 * PAD
        parts.insert(
            0,
            f'<rect x="{LEFT - PAD}" y="{top}" width="{width}" height="{y - top - PAD}" rx="6" fill="#f5f5f5" '
            'stroke="#dddddd"/>',
        )
        parts.append(_text(LEFT, top + LINE, block.title, GREY, size=12, weight="bold"))
    return y


def _row(parts: list[str], row: Row, backward: dict[str, list[Node]], y: int) -> int:
    training = row[0]
    side = _backward_lines(training, backward) if training is not None else []
    lines = [_lines(node, other) for node, other in (row, row[::-1])]
    height = 2 * PAD + LINE * max(len(lines[0]), len(lines[1]), len(side))
    for i, (text, colour) in enumerate(side):
        parts.append(_text(_x(0), y + PAD + LINE * i + 11, text, colour))
    for column, node, content in ((1, row[0], lines[0]), (2, row[1], lines[1])):
        x = _x(column)
        if node is None:
            parts.append(
                f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{height}" rx="4" fill="none" stroke="{RED}" '
                'stroke-dasharray="4 3"/>'
            )
            continue
        differs = any(colour == RED for _, colour in content)
        frame = RED if differs else _colour(_dominant(node))
        parts.append(
            f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{height}" rx="4" fill="#ffffff" stroke="{frame}" '
            f'stroke-width="{2.5 if differs else 1.5}"/>'
        )
        for i, (text, colour) in enumerate(content):
            parts.append(_text(x + PAD, y + PAD + LINE * i + 11, text, colour, weight="normal" if i else "bold"))
        parts.append(_arrow(x + BOX_WIDTH // 2, y + height, _colour(node.edges_of("output")[-1:])))
    return y + height + ARROW


def _lines(node: Node | None, other: Node | None) -> list[tuple[str, str]]:
    """(text, colour) of a box: operator and module, then its edges; red where the other side has another one."""
    if node is None:
        return []
    leaf = fold(node.module).removeprefix("model.").removeprefix("layers.*.").removeprefix("layers.*")
    same = other is not None and other.operator == node.operator
    found = [(f"{node.operator}  {'' if leaf == node.operator else leaf}", "#000000" if same else RED)]
    for edge in node.edges_of("input", "internal", "output"):
        arrow = {"input": "in", "internal": "inside", "output": "out"}[edge.role]
        equal = other is not None and same_precision(node, other, edge)
        found.append((f"{arrow} {edge.tensor}: {precision_words(edge)}", _colour([edge]) if equal else RED))
    return found


def _backward_lines(node: Node, backward: dict[str, list[Node]]) -> list[tuple[str, str]]:
    saved = [(f"saved {edge.tensor}: {precision_words(edge)}", _colour([edge])) for edge in node.edges_of("saved")]
    waiting = backward.get(node.module, [])
    match = next((candidate for candidate in waiting if candidate.operator == node.operator), None)
    if match is None:
        return saved
    waiting.remove(match)
    words = {"input": "gradient in ", "internal": "", "output": "gradient out "}
    edges = match.edges_of("input", "internal", "output")
    return saved + [(f"{words[e.role]}{e.tensor}: {precision_words(e)}", _colour([e])) for e in edges]


def _dominant(node: Node) -> Sequence[Edge]:
    """The edges that name a node's precision: its FP8 ones if there are any."""
    return [edge for edge in node.edges if edge.quantizer is not None] or node.edges_of("output")[-1:]


def _colour(edges: Sequence[Edge]) -> str:
    return COLOURS.get(edges[0].dtype, OTHER) if edges else OTHER


def _x(column: int) -> int:
    return LEFT + column * (BOX_WIDTH + GAP)


def _text(x: int, y: int, text: str, colour: str, size: int = 11, weight: str = "normal") -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def _arrow(x: int, y: int, colour: str) -> str:
    end = y + ARROW - 2
    return (
        f'<path d="M{x} {y} V{end - 5}" stroke="{colour}" stroke-width="2"/>'
        f'<path d="M{x - 5} {end - 6} h10 l-5 7 z" fill="{colour}"/>'
    )
