"""Collectives of torch.distributed: their names and groups, and what sees them, for either engine."""
