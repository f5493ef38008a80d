"""Pure state of speculative decoding: the log, rounds, stops, statistics, the policy for gamma.

No Ray, no torch: everything here runs in a plain interpreter.
"""
