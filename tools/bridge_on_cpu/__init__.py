"""Run the real Megatron-Core and Megatron Bridge on a machine that has no CUDA device.

``prepare()`` before anything of Megatron is imported, ``settle()`` after. Nothing of Megatron, Bridge, NVRx or
``torch.distributed.checkpoint`` is replaced by a stand-in, with one exception, the fused Adam kernel of apex and
Transformer Engine, which is CUDA code: see ``adam``.

The "CUDA" random generator is the CPU's here, so Megatron's RNG tracker is exercised for real; keep dropout at 0 where
two trajectories are compared.
"""

from __future__ import annotations


def prepare() -> None:
    """Make torch take ``cuda`` for ``cpu``, ``nccl`` for ``gloo``, and let Bridge import without Transformer Engine."""
    from . import absent_te, cuda_as_cpu

    absent_te.install()
    cuda_as_cpu.install()


def settle() -> None:
    """Use what Bridge offers for a machine without CUDA; imports Megatron."""
    import functools
    import importlib.util

    import megatron.bridge.peft.utils as adapters
    import megatron.bridge.training.initialize as initialize
    import megatron.bridge.training.setup as setup
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    from . import adam

    setup.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    # The wheel carries the compiled helpers; building them again would need make and pybind11.
    initialize.compile_helpers = lambda: None
    # Two million tokens, and not the 200 million whose samples every start would shuffle.
    MockGPTLowLevelDataset.size = 1000
    adam.install()
    if importlib.util.find_spec("transformer_engine") is None:
        # Megatron-Core's names for Transformer Engine's layers exist without it, as None, and Bridge takes them for it.
        adapters.HAVE_TE = False
