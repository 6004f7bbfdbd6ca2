"""What the readers and the writers of trace files share: header, escaping, args, ids, limits, framing of packets."""
