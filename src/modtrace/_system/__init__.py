"""What the operating system gives: files, processors, processes."""
