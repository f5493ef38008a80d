"""The tools of one request and what the client wants done with them; checked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.errors import InvalidRequest
from specdec.gateway.structured import Constraint, json_schema

MAX_TOOLS = 128
MAX_CALLS = 16
"""Calls in an answer that is held to a grammar: a weak model would go on to the end of its context."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

ToolMode = Literal["auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call."""

    name: str
    arguments: Constraint
    definition: str
    """JSON text of all of it, as chat templates expect it."""
    is_strict: bool = False
    """A call that the model makes of its own accord, too, must follow the schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools to offer. Without any, or where none may be called, a request has no `ToolUse`."""

    tools: tuple[Tool, ...]
    mode: ToolMode = "auto"
    """``required``: the answer is a call."""
    forced: str | None = None
    """With ``required``: the one function to call, once."""
    is_parallel: bool = True
    """Whether an answer may hold several calls."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    def definitions(self) -> list[object]:
        """The tools as chat templates expect them."""
        return [json.loads(tool.definition) for tool in self.tools]

    @property
    def is_held(self) -> bool:
        """Whether calls, if there are any, must follow a grammar."""
        return self.mode == "required" or any(tool.is_strict for tool in self.tools)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        return tuple(tool for tool in self.tools if self.forced in (None, tool.name))

    @property
    def max_calls(self) -> int:
        return MAX_CALLS if self.is_parallel and self.forced is None else 1


def make_tool(
    name: str,
    description: str | None,
    parameters: dict[str, object] | None,
    param: str,
    *,
    is_strict: bool = False,
) -> Tool:
    """Check a function's definition; whether its schema can be followed is found out when it is needed.

    Args:
        name: of the function.
        description: for the model.
        parameters: JSON schema of its arguments; None takes none.
        param: the field it came in, for errors.
        is_strict: see `Tool`.

    Raises:
        InvalidRequest: naming the part of ``param`` at fault.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{param}.name must have 1 to 64 letters, digits, '_', '-' or '.', got {name[:80]!r}",
            f"{param}.name",
        )
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f'{param}.parameters must be of type "object"', f"{param}.parameters")
    schema = {"type": "object", **parameters}
    function = {"name": name, "description": description or "", "parameters": schema}
    try:
        definition = json.dumps({"type": "function", "function": function})
    except RecursionError as error:
        raise InvalidRequest(f"{param}.parameters: nested too deeply", f"{param}.parameters") from error
    arguments = json_schema(schema, f"{param}.parameters")
    return Tool(name=name, arguments=arguments, definition=definition, is_strict=is_strict)


def make_tool_use(
    tools: Sequence[Tool], choice: str | None, forced: str | None, *, is_parallel: bool
) -> ToolUse | None:
    """Combine a request's tool fields.

    Args:
        tools: offered; may be empty.
        choice: ``none``, ``auto`` or ``required``; None is ``auto``.
        forced: the name of the one function to call, in place of ``choice``.
        is_parallel: whether one answer may hold several calls.

    Returns:
        None where nothing may be called.

    Raises:
        InvalidRequest: naming ``tools`` or ``tool_choice``.
    """
    _check_tools(tools)
    if forced is not None and forced not in {tool.name for tool in tools}:
        raise InvalidRequest(f"tool_choice names {forced[:80]!r}, which is not among tools", "tool_choice")
    is_required = forced is not None or choice == "required"
    if is_required and not tools:
        raise InvalidRequest("tool_choice asks for a call, but there are no tools", "tool_choice")
    if not tools or (choice == "none" and not is_required):
        return None
    return ToolUse(
        tools=tuple(tools),
        mode="required" if is_required else "auto",
        forced=forced,
        is_parallel=is_parallel,
    )


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are allowed", "tools")
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise InvalidRequest(f"tools names {tool.name!r} twice", "tools")
        seen.add(tool.name)
