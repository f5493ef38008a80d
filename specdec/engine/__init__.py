"""What runs inside a worker: models, KV cache, drafting and verification. Knows nothing of Ray."""
