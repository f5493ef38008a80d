"""Measuring: a served model from outside, and the coordinator on simulated devices. None of it knows Ray."""
