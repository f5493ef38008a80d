"""Generated protobuf and gRPC code of ``protos/specdec/v1``; remake it with ``python protos/generate.py``."""
