"""PyTorch's distributed checkpoint (DCP) on the memory store."""
