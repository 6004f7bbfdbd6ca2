"""From events to modules: alignment of the clocks, calls, autograd nodes, GPU work, and the spans made of them."""
