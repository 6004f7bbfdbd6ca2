"""What a step would have taken, had a late rank been like the others."""
