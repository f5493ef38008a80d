"""Checks and times the engine on one GPU, without Ray and without anything to download."""
