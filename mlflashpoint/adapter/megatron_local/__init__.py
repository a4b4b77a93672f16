"""Local (non-persistent) checkpoints of Megatron's training loops, kept in the memory store.

Megatron Bridge's loop and Megatron-LM's own hand the same thing to a local checkpoint manager, and take it back. What
is the same in both is here; each has an adapter for the rest.
"""
