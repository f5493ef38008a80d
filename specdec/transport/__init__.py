"""Calls between our processes: typed messages on one long-lived TCP connection per pair.

See docs/decisions/0013-transport.md.
"""

from specdec.transport.channel import CallFailed, CallTimeout, Channel, ChannelLost
from specdec.transport.methods import Method
from specdec.transport.server import CallServer, Unary

__all__ = ["CallFailed", "CallServer", "CallTimeout", "Channel", "ChannelLost", "Method", "Unary"]
