"""Streams that are read while a test does something to the server."""

from __future__ import annotations

import threading
import time

import grpc

from specdec.gateway.proto import generation_pb2 as pb
from tests.e2e.harness import Server, wait_for


class Stream:
    """A gRPC stream read in the background."""

    def __init__(self, server: Server, request: pb.GenerateRequest) -> None:
        self.token_ids: list[int] = []
        self.pauses_s: list[float] = []
        self.metrics: pb.SpeculativeMetrics | None = None
        self.error: grpc.RpcError | None = None
        self.call = server.stub().GenerateStream(request, timeout=180)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        last_s = time.monotonic()
        try:
            for chunk in self.call:
                now_s = time.monotonic()
                self.pauses_s.append(now_s - last_s)
                last_s = now_s
                self.token_ids.extend(chunk.token_ids)
                if chunk.HasField("speculative_metrics"):
                    self.metrics = chunk.speculative_metrics
        except grpc.RpcError as error:
            self.error = error

    def wait_for_tokens(self, count: int) -> None:
        wait_for(lambda: len(self.token_ids) >= count or self.error, 60, f"{count} tokens")
        assert self.error is None

    def finish(self) -> list[int]:
        self.thread.join(180)
        assert not self.thread.is_alive()
        assert self.error is None, self.error
        return self.token_ids
