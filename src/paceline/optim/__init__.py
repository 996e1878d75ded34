"""How parameters change: optimizers and schedules."""
