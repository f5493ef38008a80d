"""What every client library is asked for."""

from __future__ import annotations

from typing import Literal

import pydantic

MODEL = "smollm2"
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
PLAIN = {"speculative": {"num_speculative_tokens": 0}}
"""Fields that switch drafting off for one request."""


class Pet(pydantic.BaseModel):
    """A pet to be invented."""

    name: str = pydantic.Field(max_length=20)
    kind: Literal["cat", "dog"]


def get_weather(city: Literal["Oslo", "Rome"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Weather of a city."""
    return f"It is 12 degrees {unit} in {city}."


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": get_weather.__doc__,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Rome"]},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
