"""A ring's events → a timeline: pair, nest, attribute nodes to calls, cut backward spans, convert the clock.

`RingAnalysis` computes each of these steps at most once.
"""
