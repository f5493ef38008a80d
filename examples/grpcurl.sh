#!/bin/sh
# A chat turn over gRPC from a shell. Run in the root of this repository: the contract is read from protos/.
set -eu
address=${SPECDEC_GRPC:-127.0.0.1:9000}

call() {
    grpcurl -plaintext -import-path protos -proto specdec/v1/generation.proto \
        -H "authorization: Bearer ${SPECDEC_API_KEY:-none}" -d "$2" "$address" "specdec.v1.GenerationService/$1"
}

call GetModelInfo '{}'
call GenerateStream '{
  "messages": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
  "sampling": {"max_tokens": 40, "temperature": 0},
  "speculative": {"metrics": true}
}'
