"""A ring's events → a timeline: pair, nest, attribute the nodes to calls, cut backward spans, convert the clock.

`RingAnalysis` computes each of these at most once per look at a ring.
"""
