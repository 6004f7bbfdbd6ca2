"""The native engine: calls and backward passes are seen, and written, in C++."""
