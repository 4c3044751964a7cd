"""The picture of a precision flow is one well-formed file that shows what the graphs say."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from jetrl_megatron.trainer.flow_picture import RED, draw
from tests.support.flows import FP8, decoder, linear


def texts(svg: str) -> list[tuple[str, str]]:
    """(text, colour) of every label."""
    labels = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [(label.text or "", label.attrib["fill"]) for label in labels]


def test_equal_flows() -> None:
    """Three equal layers are drawn once, only the legend's square is red, and nothing is loaded."""
    svg = draw(decoder("training", backward=True), decoder("prefill"), decoder("decode"))
    labels = [text for text, _ in texts(svg)]
    assert "Precision flow: rollout is a subgraph of the training forward" in labels
    assert "layers 0 to 2 (x 3, all alike)" in labels
    assert "rollout (prefill and decode)" in labels
    assert labels.count("inside x: float8_e4m3fn 1x128 fp32 ours") == 2 * 2  # qkv and down, on both sides
    assert "saved x: bfloat16" in labels
    assert "gradient in dy: bfloat16" in labels
    assert svg.count(RED) == 1
    assert "href" not in svg


def test_differences_are_red() -> None:
    """One layer whose engine quantizes otherwise: it is drawn apart, its differing edges are red on both sides."""
    training, prefill = decoder("training", backward=True), decoder("prefill")
    module = "model.layers.1.mlp.down_proj"
    other = linear(module, ("row", *FP8[1:]))
    decode = replace(prefill, side="decode", nodes=tuple(other if n.module == module else n for n in prefill.nodes))
    found = texts(draw(training, decode, decode))
    assert "Precision flow: rollout is NOT a subgraph: see red" in [text for text, _ in found]
    red = [text for text, colour in found if colour == RED and ":" in text and not text.startswith("Precision")]
    assert red == ["inside x: float8_e4m3fn 1x128 fp32 ours", "inside x: float8_e4m3fn row fp32 ours"]
    titles = {text for text, _ in found if text.startswith("layer")}
    assert titles == {"layer 0", "layer 1", "layer 2"}


def test_phases_that_differ_are_drawn_both() -> None:
    """Where decode is not prefill, each is drawn against training; a missing operator is an empty place."""
    training, prefill = decoder("training"), decoder("prefill")
    decode = replace(prefill, side="decode", nodes=tuple(n for n in prefill.nodes if n.operator != "swiglu"))
    svg = draw(training, prefill, decode)
    labels = [text for text, _ in texts(svg)]
    assert {"rollout: prefill", "rollout: decode"} <= set(labels)
    assert labels.count("swiglu  mlp") == 3
    assert svg.count("stroke-dasharray") == 1
