"""How a framework's state becomes shards and back."""
