"""What the agent makes of a script's own calls of ``torch.distributed.checkpoint``; the script knows nothing of us."""
