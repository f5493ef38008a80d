"""OpenAI's own client: a whole answer with specdec's counters, then a stream."""

import os

import openai

client = openai.OpenAI(
    base_url=f"{os.environ.get('SPECDEC_URL', 'http://127.0.0.1:8000')}/v1",
    api_key=os.environ.get("SPECDEC_API_KEY", "none"),
)
(model,) = client.models.list().data
messages = [{"role": "user", "content": "What is the capital of France?"}]

answer = client.chat.completions.create(
    model=model.id,
    messages=messages,
    max_tokens=40,
    seed=7,
    extra_body={"speculative": {"metrics": True}},
)
print(answer.choices[0].message.content)
print(answer.model_extra["metrics"]["speculative_decoding"])

for chunk in client.chat.completions.create(
    model=model.id, messages=messages, max_tokens=40, temperature=0, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
