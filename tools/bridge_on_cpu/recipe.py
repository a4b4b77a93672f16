"""A small GPT pretraining recipe for Megatron Bridge, as a user would write it; works with every Bridge from 0.4.2 on.

Bridge's config classes gain fields from version to version: ``_make`` leaves out those that the installed one lacks.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Options:
    """What the runs of this recipe differ in; sizes in elements, intervals in steps."""

    steps: int = 6
    save: str | None = None
    load: str | None = None
    checkpoint: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    tensor_parallel: int = 1
    distributed_optimizer: bool = True
    bf16: bool = False
    hidden: int = 32
    layers: int = 2
    vocabulary: int = 128
    sequence: int = 16
    samples_per_step: int = 4
    lora: bool = False
    verbose: bool = False


def _make(cls: type, **values: Any) -> Any:
    known = {f.name for f in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in known})


def configuration(options: Options) -> Any:
    """The ``ConfigContainer`` for ``options``; imports Bridge."""
    import megatron.bridge.training.config as config
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    dtype = torch.bfloat16 if options.bf16 else torch.float32
    precision = {"bf16": options.bf16, "params_dtype": dtype}
    validation = {"eval_iters": 0, "eval_interval": 1000}
    model = _make(
        GPTModelProvider,
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=4 * options.hidden,
        num_attention_heads=4,
        seq_length=options.sequence,
        vocab_size=options.vocabulary,
        transformer_layer_spec=local_layer_spec,
        share_embeddings_and_output_weights=True,
        tensor_model_parallel_size=options.tensor_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
        **precision,
    )
    parts: dict[str, Any] = {}
    if hasattr(config, "ValidationConfig"):
        parts["validation"] = _make(config.ValidationConfig, **validation)
    if options.lora:
        from megatron.bridge.peft.lora import LoRA

        parts["peft"] = LoRA(target_modules=["linear_qkv", "linear_proj"], dim=4, alpha=8, dropout=0.0)
    return config.ConfigContainer(
        model=model,
        optimizer=_make(
            config.OptimizerConfig,
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            weight_decay=0.01,
            clip_grad=1.0,
            use_distributed_optimizer=options.distributed_optimizer,
            **precision,
        ),
        ddp=_make(
            config.DistributedDataParallelConfig,
            use_distributed_optimizer=options.distributed_optimizer,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=False,
        ),
        train=_make(
            config.TrainingConfig,
            **{
                "micro_batch_size": 1,
                "global_batch_size": options.samples_per_step,
                "train_iters": options.steps,
                "manual_gc": False,
                **validation,
                **options.train,
            },
        ),
        scheduler=_make(
            config.SchedulerConfig,
            lr_decay_style="cosine",
            lr_warmup_iters=1,
            lr_decay_iters=100,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        dataset=config.MockGPTDatasetConfig(
            seq_length=options.sequence,
            random_seed=1234,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_dataset_builder_threads=1,
            data_sharding=True,
            dataloader_type="single",
            num_workers=0,
            skip_getting_attention_mask_from_dataset=True,
        ),
        logger=_make(
            config.LoggerConfig,
            log_interval=1,
            tensorboard_dir=None,
            logging_level=logging.INFO if options.verbose else logging.WARNING,
        ),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=options.vocabulary - 1),
        checkpoint=_make(
            config.CheckpointConfig,
            **{
                "save": options.save,
                "load": options.load,
                "save_interval": 0,
                "ckpt_format": "torch_dist",
                "async_strategy": "mcore",
                **options.checkpoint,
            },
        ),
        rng=_make(config.RNGConfig, seed=4321),
        dist=_make(
            config.DistributedInitConfig,
            distributed_backend="gloo",
            use_gloo_process_groups=True,
            disable_jit_fuser=True,
        ),
        mixed_precision=None,
        **parts,
    )
