"""Traces of torch.profiler: read them, align a recording with them, attribute kernels to modules, merge.

- Reading: `event_collector` picks out of the table of events what the rest needs, as columns.
- Aligning: `alignment` by marks that both saw, then by the operators, in whose gaps the edges of calls are.
- Attributing: `recorded_part` picks what of a recording the trace is about, and finds the call that ran at a moment.
  `device_work` finds the launch of each kernel and so its call, and adds up the work; `backward_nodes` finds the call
  of each autograd node. `stream_spans` makes the spans above the streams. `overlay` calls all of these, and makes a
  recording of the trace alone if there is no other.
- Writing: `merge` is the whole; `merged_json` and `merged_perfetto` write a format each,
  the first chooses times that nest in every reader.
- `recording/profiler_handler` does it all for `torch.profiler.profile(on_trace_ready=…)`.
"""
