"""What to expect of a job before it starts: memory, replication time, lost work, odds of recovery. Needs no machine."""
