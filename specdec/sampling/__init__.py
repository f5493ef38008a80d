"""Logits to law to token: pure functions on tensors, no models, no I/O.

The pieces in the order a round uses them: `processors` turn logits into the law a client asked for, `noise`
gives counter-based randomness, `verification` judges drafts against the target's law.
"""
