"""Traces of torch.profiler: read them, align a recording with them, attribute kernels to modules, merge.

- Reading: `event_collector` selects the events for attribution from the table of events, as columns.
- Aligning: `alignment` uses sync marks that both contain, then operators: the edges of calls are in their gaps.
- Attributing: `recorded_part` cuts a recording to the trace, and finds the call that ran at a moment. `device_work`
  finds the launch and the call of each kernel, and adds up the work; `backward_nodes` finds the call of each autograd
  node. `stream_spans` makes the spans above the streams. `overlay` calls all of these; without a recording it makes
  one from the trace.
- Writing: `merge` runs all steps; `merged_json` and `merged_perfetto` write one format each. `merged_json` chooses
  times that nest in every reader.
- `recording/profiler_handler` merges for `torch.profiler.profile(on_trace_ready=…)`.
"""
