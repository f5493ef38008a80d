"""What an output must look like: JSON, a JSON schema, a regular expression, a grammar, a choice.

All of them become an object of llguidance's grammar language; whether it can be followed is found out in
`specdec.gateway.output_grammars`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from llguidance import regex_to_lark

from specdec.errors import InvalidRequest

MAX_CONSTRAINT_CHARS = 128 * 1024
"""Of the JSON text, expression or grammar."""
MAX_CHOICES = 1024

WHITESPACE = r"[ \n\t]{0,24}"
"""Between the tokens of a JSON text. Without a bound a weak model goes on with it until its context ends."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must match."""

    grammar: str
    """JSON text of one grammar object: ``lark_grammar`` or ``json_schema``, without a name."""
    param: str
    """The request field it came in, for errors."""
    may_name_tokens: bool = False
    """It may ask for tokens by name."""


def json_schema(schema: dict[str, object] | str, param: str) -> Constraint:
    """The output is a JSON text that the schema accepts.

    Args:
        schema: the schema or its JSON text.
        param: the request field, for errors.

    Raises:
        InvalidRequest: it is no JSON object, or too large.
    """
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, dict):
            raise InvalidRequest(f"{param}: a JSON schema must be an object", param)
        # A client's own ``x-guidance`` goes first.
        return _constraint(
            {"json_schema": {"x-guidance": {"whitespace_pattern": WHITESPACE}, **value}}, param
        )
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {str(error)[:200]}", param) from error


def json_object(param: str) -> Constraint:
    """The output is any JSON object."""
    return json_schema({"type": "object"}, param)


def regex(pattern: str, param: str) -> Constraint:
    """The whole output matches a regular expression of Rust's ``regex`` crate, digits and letters ASCII's."""
    return _constraint({"lark_grammar": f"start: /{regex_to_lark(pattern, use_ascii='dw')}/"}, param)


def lark(grammar: str, param: str) -> Constraint:
    """The output matches a Lark grammar in llguidance's dialect, from its rule ``start``."""
    return replace(_constraint({"lark_grammar": grammar}, param), may_name_tokens=True)


def choice(texts: list[str], param: str) -> Constraint:
    """The output is one of these texts.

    Raises:
        InvalidRequest: there are none, or too many.
    """
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequest(f"{param} must have 1 to {MAX_CHOICES} texts", param)
    # One terminal, so that a text may begin with another.
    alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return _constraint({"lark_grammar": f"start: CHOICE\nCHOICE: {alternatives}"}, param)


def _constraint(grammar: dict[str, object], param: str) -> Constraint:
    text = json.dumps(grammar)
    if len(text) > MAX_CONSTRAINT_CHARS:
        raise InvalidRequest(
            f"{param} is too large: {len(text)} characters, at most {MAX_CONSTRAINT_CHARS} are allowed",
            param,
        )
    return Constraint(text, param)
