"""Parts that readers and writers of trace files share: header, escaping, args, ids, limits, framing of packets."""
