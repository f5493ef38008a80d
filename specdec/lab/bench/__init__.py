"""`specdec bench serve`: a load generator for any OpenAI-compatible endpoint.

Its own CPU use is part of every figure on a small machine, hence plain asyncio streams instead of an HTTP
library: docs/decisions/0009-load-generator.md has the figures.
"""
