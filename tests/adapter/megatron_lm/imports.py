"""What train.py and the loop import, with CUDA answered by the CPU before it; for a warm process (tests/warm.py)."""

import bridge_on_cpu.cuda_as_cpu

bridge_on_cpu.cuda_as_cpu.install()

import megatron.core.datasets.blended_megatron_dataset_builder  # noqa: E402
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.training.argument_utils  # noqa: E402
import megatron.training.training  # noqa: E402, F401
import modelopt.torch.distill.plugins.megatron  # noqa: E402, F401
from bridge_on_cpu import adam, digests  # noqa: E402, F401
