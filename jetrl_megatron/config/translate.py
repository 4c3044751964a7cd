"""Pydantic's errors in this project's words. Users never see pydantic's own text."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jetrl_megatron.config.errors import Violation, show
from jetrl_megatron.config.schema_doc import KeyDoc, walk

_BOUNDS = {
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
}


def translate(error: ValidationError) -> list[str]:
    """One line per fault, in the order of the schema."""
    docs = {doc.key: doc for doc in walk()}
    lines = [str(_one(details, docs)) for details in error.errors(include_url=False)]
    return list(dict.fromkeys(lines))


def nearest_keys(key: str, docs: dict[str, KeyDoc], limit: int = 3) -> list[str]:
    """Valid dotted keys that a user who wrote `key` may have meant, best first.

    A key of the same name in another section comes first; then similar names, the own section preferred.
    """
    section, _, leaf = key.rpartition(".")

    def score(candidate: str) -> float:
        other_section, _, other = candidate.rpartition(".")
        ratio = difflib.SequenceMatcher(None, leaf.lower(), other.lower()).ratio()
        return ratio + (0.15 if other_section == section else 0.0)

    ranked = sorted(docs, key=score, reverse=True)
    return [k for k in ranked if score(k) >= 0.7][:limit]


def _one(details: ErrorDetails, docs: dict[str, KeyDoc]) -> Violation | str:
    kind, value = details["type"], details["input"]
    key = ".".join(str(part) for part in details["loc"])
    context = details.get("ctx", {})
    if kind == "value_error":
        message = str(context["error"])
        return f"{key}.{message}" if key else message
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown(key, value, docs)
    if kind == "missing":
        doc = docs.get(key)
        what = f" ({doc.help})" if doc is not None else ""
        return Violation(key, "missing", f"required{what}", f"add `{key}:`, see `jetrl schema`")
    if kind in _BOUNDS:
        return Violation(key, show(value), _BOUNDS[kind].format(**context), "choose a value in that range")
    if kind == "finite_number":
        return Violation(key, str(value), "a finite number", "write a finite number")
    if kind == "string_pattern_mismatch":
        return Violation(key, show(value), "letters, digits, '.', '_' and '-', not starting with '.'", "rename it")
    return _wrong_type(key, value, docs)


def _unknown(key: str, value: Any, docs: dict[str, KeyDoc]) -> Violation:
    near = nearest_keys(key, docs)
    section = key.rpartition(".")[0]
    if near:
        fix = f"did you mean {' or '.join(near)}?"
    else:
        inside = [k for k in docs if k.rpartition(".")[0] == section]
        fix = f"use one of {', '.join(inside)}" if inside else "see `jetrl schema`"
    return Violation(key, show(value), "a known key", fix)


def _wrong_type(key: str, value: Any, docs: dict[str, KeyDoc]) -> Violation:
    doc = docs.get(key)
    while doc is None and "." in key:  # an element of a list or of a union: report the key that holds it
        key = key.rpartition(".")[0]
        doc = docs.get(key)
    if doc is None:
        return Violation(key or "config", show(value), "the type of the schema", "see `jetrl schema`")
    if doc.section:
        fix = f"put keys under `{key}:` or remove it" if value is None else f"put keys under `{key}:`"
        return Violation(key, show(value), "a section (mapping)", fix)
    if "text" in doc.type and not isinstance(value, str | dict | list | None):
        return Violation(key, show(value), f"type {doc.type}", f'put it in quotes: "{value}"')
    example = f"write e.g. {doc.default}" if doc.default not in ("null", "required") else "see `jetrl schema`"
    if doc.choices:
        near = difflib.get_close_matches(str(value), doc.choices, n=1)
        return Violation(
            key, show(value), f"one of {' | '.join(doc.choices)}", f"did you mean {near[0]}?" if near else example
        )
    return Violation(key, show(value), f"type {doc.type}", example)
