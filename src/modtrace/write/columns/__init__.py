"""Columns of NumPy as the bytes of a format: decimal digits, protobuf records, packets; thousands at a time."""
