"""What the readers and the writers of a trace format share: its header, its escaping, its framing."""
