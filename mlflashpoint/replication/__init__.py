"""Who holds whose replica, and how the bytes get there. Knows torch and no framework, and nothing of the core."""
