"""What the operating system gives and tells: reading files by offset, processors, and what it says of processes."""
