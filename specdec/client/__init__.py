"""A thin client for both protocols; it needs neither torch nor Ray.

    from specdec.client import Client

    with Client("http://127.0.0.1:8000") as client:
        answer = client.chat([{"role": "user", "content": "Tell me a story."}], max_tokens=200)
        print(answer.text, answer.usage.completion_tokens)

`AsyncClient` is the same for an event loop. Errors are those of `specdec.errors`.
"""

from specdec.client.client import AsyncClient, Client
from specdec.client.options import Message, Options, Prompt
from specdec.client.results import Answer, Piece, Speculation, ToolCall, Usage

__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "Message",
    "Options",
    "Piece",
    "Prompt",
    "Speculation",
    "ToolCall",
    "Usage",
]
