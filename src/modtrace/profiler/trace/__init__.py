"""Reading a torch.profiler trace: its bytes, its events one by one, and the columns gathered from them."""
