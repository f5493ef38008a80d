"""specdec's own client: the same calls over HTTP and gRPC."""

import os

from specdec.client import Client

urls = [
    os.environ.get("SPECDEC_URL", "http://127.0.0.1:8000"),
    f"grpc://{os.environ.get('SPECDEC_GRPC', '127.0.0.1:9000')}",
]
messages = [{"role": "user", "content": "What is the capital of France?"}]

for url in urls:
    with Client(url, api_key=os.environ.get("SPECDEC_API_KEY"), timeout_s=60) as client:
        answer = client.chat(messages, max_tokens=40, temperature=0, speculative={"metrics": True})
        print(answer.text, answer.finish_reason, answer.usage, answer.speculation, sep="\n")
        for piece in client.stream("Once upon a time", max_tokens=20, seed=7):
            print(piece.text, end="", flush=True)
        print()
