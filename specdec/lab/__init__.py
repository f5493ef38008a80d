"""Measuring and inspecting a served model from outside: light imports alone, neither torch nor Ray."""
