"""What a job does now: steps per second and time per module over the last seconds, read from its rings."""

from .rates import RankRates, read_rank_rates

__all__ = ["RankRates", "read_rank_rates"]
