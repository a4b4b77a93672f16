"""What train.py and habits.py import, and what torch imports for them later; for a warm process (tests/warm.py)."""

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.multiprocessing
import torch.nn.parallel  # noqa: F401
