"""Tracking torch: the two engines that write events into a ring, and the trackers of running modules."""
