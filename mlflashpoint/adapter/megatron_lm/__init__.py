"""Megatron-LM's own training loop (``megatron.training``), its local checkpoints kept in the memory store.

Used by the agent alone. Without it a script saves and loads through ``mlflashpoint.adapter.megatron``.
"""
