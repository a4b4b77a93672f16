"""Which function of which framework is wrapped, and nothing else."""
