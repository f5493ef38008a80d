"""HTTP and gRPC: checks requests, turns text into tokens and back. Knows nothing of Ray or workers."""
