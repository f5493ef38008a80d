#!/bin/sh
# A chat turn over HTTP: whole, then streamed.
set -eu
url=${SPECDEC_URL:-http://127.0.0.1:8000}

ask() {
    curl --silent --show-error --fail-with-body "$@" "$url/v1/chat/completions" \
        -H "Authorization: Bearer ${SPECDEC_API_KEY:-none}" -H 'Content-Type: application/json' -d @-
}

ask <<'JSON'
{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "max_tokens": 40, "temperature": 0, "speculative": {"metrics": true}
}
JSON
echo

ask --no-buffer <<'JSON'
{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "max_tokens": 40, "seed": 7, "stream": true, "stream_options": {"include_usage": true}
}
JSON
