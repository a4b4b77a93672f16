"""The memory store: ids, shard format, arena, saver, loader, recovery plan, runtime. Knows torch and no framework."""
