"""specdec: exact speculative decoding with draft and target on separate devices."""

from importlib.metadata import version

__version__ = version("specdec")
