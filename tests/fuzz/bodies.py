"""Requests that are nearly right: a good one with a few fields replaced. Random ones seldom come that far."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Body = dict[str, Any]

# Half of all values are ordinary ones: what is refused at once tries nothing behind the first check.
INTEGERS = st.one_of(
    st.integers(0, 8),
    st.integers(1, 4),
    st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2, 16, 33]),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**70, 10**30]),
)
NUMBERS = st.one_of(
    st.floats(0, 1, exclude_min=True),
    st.sampled_from([0, 0.5, 1, 1e-6]),
    INTEGERS,
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([1e308, -0.0, 5e-324]),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "\x00", "\ud83d", "😀", "<|im_end|>", "a" * 5000, "{{ messages }}", "red", "null"]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.one_of(st.just("text"), TEXTS), "text": TEXTS}), max_size=2
)
TOKEN_IDS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 300), INTEGERS), max_size=3)

SCHEMAS = st.one_of(
    JSON,
    st.sampled_from(
        [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"enum": ["red", "green"]},
            {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
            {"type": "string", "pattern": "(a+)+$"},
            {"$ref": "https://example.com/elsewhere"},
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
        ]
    ),
)
GRAMMARS = st.one_of(
    st.fixed_dictionaries({"json": SCHEMAS}),
    st.fixed_dictionaries(
        {"regex": st.one_of(TEXTS, st.sampled_from(["(red|green)+", "(a{9999}){9999}", "["]))}
    ),
    st.fixed_dictionaries({"grammar": st.one_of(TEXTS, st.just('start: "red" | "green"'))}),
    st.fixed_dictionaries({"choice": st.lists(TEXTS, max_size=3)}),
    JSON,
)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": INTEGERS,
    "min_tokens": INTEGERS,
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": INTEGERS,
    "min_p": NUMBERS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "logit_bias": st.dictionaries(st.one_of(st.integers(-2, 400).map(str), TEXTS), NUMBERS, max_size=3),
    "seed": INTEGERS,
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=18)),
    "stop_token_ids": TOKEN_IDS,
    "bad_words": st.lists(TEXTS, max_size=3),
    "ignore_eos": st.booleans(),
    "n": INTEGERS,
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": SCALARS}),
    "speculative": st.fixed_dictionaries(
        {}, optional={"num_speculative_tokens": INTEGERS, "mode": TEXTS, "metrics": st.booleans()}
    ),
    "user": TEXTS,
    "model": TEXTS,
    "structured_outputs": GRAMMARS,
}
CHAT_FIELDS = FIELDS | {
    "max_completion_tokens": INTEGERS,
    "logprobs": st.booleans(),
    "top_logprobs": INTEGERS,
    "response_format": st.one_of(
        st.just({"type": "json_object"}),
        st.fixed_dictionaries(
            {
                "type": st.just("json_schema"),
                "json_schema": st.fixed_dictionaries({"name": TEXTS, "schema": SCHEMAS}),
            }
        ),
        JSON,
    ),
    "tools": st.lists(
        st.fixed_dictionaries(
            {
                "type": st.just("function"),
                "function": st.fixed_dictionaries({"name": TEXTS}, optional={"parameters": SCHEMAS}),
            }
        ),
        max_size=2,
    ),
    "chat_template_kwargs": JSON,
    "parallel_tool_calls": st.booleans(),
    "tool_choice": st.one_of(st.sampled_from(["none", "auto", "required"]), JSON),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"])},
            optional={
                "content": st.one_of(
                    TEXTS,
                    st.none(),
                    st.lists(st.fixed_dictionaries({"type": TEXTS, "text": TEXTS}), max_size=2),
                ),
                "name": TEXTS,
                "tool_call_id": TEXTS,
                "tool_calls": JSON,
            },
        ),
        max_size=4,
    ),
}
RESPONSES_FIELDS = {
    **{name: field for name, field in FIELDS.items() if name not in ("max_tokens", "n", "stream_options")},
    "max_output_tokens": INTEGERS,
    "instructions": TEXTS,
    "input": st.one_of(TEXTS, CHAT_FIELDS["messages"], JSON),
    "text": st.fixed_dictionaries(
        {"format": st.fixed_dictionaries({"type": TEXTS}, optional={"name": TEXTS, "schema": SCHEMAS})}
    ),
    "tools": st.lists(
        st.fixed_dictionaries({"type": st.just("function"), "name": TEXTS}, optional={"parameters": SCHEMAS}),
        max_size=2,
    ),
    "tool_choice": CHAT_FIELDS["tool_choice"],
}
TEXT_FIELDS = FIELDS | {
    "prompt": st.one_of(TEXTS, TOKEN_IDS, st.lists(TEXTS, max_size=3), st.lists(TOKEN_IDS, max_size=3)),
    "logprobs": INTEGERS,
    "echo": st.booleans(),
    "best_of": INTEGERS,
    "suffix": TEXTS,
}


def _nearly(
    good: dict[str, Any], fields: dict[str, st.SearchStrategy[Any]]
) -> st.SearchStrategy[dict[str, Any]]:
    """The good body with up to three fields of the right kind, and at times one of any kind."""

    @st.composite
    def body(draw: st.DrawFn) -> Body:
        names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True))
        changed = {**good, **{name: draw(fields[name]) for name in names}}
        if draw(st.integers(0, 4)) == 0:
            changed[draw(st.sampled_from([*sorted(fields), "surprise"]))] = draw(JSON)
        return changed

    return body()


BODIES = st.one_of(
    st.tuples(
        st.just("/v1/chat/completions"),
        _nearly({"messages": [{"role": "user", "content": "one"}], "max_tokens": 4}, CHAT_FIELDS),
    ),
    st.tuples(st.just("/v1/responses"), _nearly({"input": "one", "max_output_tokens": 4}, RESPONSES_FIELDS)),
    st.tuples(st.just("/v1/completions"), _nearly({"prompt": "one", "max_tokens": 4}, TEXT_FIELDS)),
    st.tuples(
        st.just("/tokenize"),
        _nearly({"prompt": "one"}, {"prompt": TEXTS, "add_special_tokens": st.booleans(), "model": TEXTS}),
    ),
    st.tuples(st.just("/detokenize"), _nearly({"tokens": [1, 2]}, {"tokens": TOKEN_IDS, "model": TEXTS})),
)
"""Paths with bodies."""
