"""A user's training script on Megatron-LM's own loop; it knows nothing of mlflashpoint, and notes what it sees.

What is changed so that the loop runs without a CUDA device is ``tools/bridge_on_cpu`` and ``on_cpu`` below, both of
this test alone. Nothing of ``megatron.training`` that has to do with checkpoints is touched.
"""

import functools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path


def on_cpu():
    """After the imports: what asks for a CUDA device is told that it can do without."""
    import importlib

    import megatron.core.datasets.utils as dataset_utils
    from bridge_on_cpu import adam
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.training import initialize

    training = importlib.import_module("megatron.training.training")
    training.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    # The wheel carries the compiled helpers; building them again would need make and pybind11.
    dataset_utils.compile_helpers = lambda: None
    # Two million tokens, and not the 200 million whose samples every start would shuffle.
    MockGPTLowLevelDataset.size = 1000
    adam.install()


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args) if config is None else config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
        pg_collection=pg_collection,
    )


def datasets(samples, vp_stage=None):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args, get_tokenizer

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="1,0,0",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


#: every rank builds them, those of one tensor parallel group the same
datasets.is_distributed = True


def forward_step(data_iterator, model):
    import torch
    from megatron.core import tensor_parallel

    data = next(data_iterator)
    mask = data["loss_mask"]
    tokens, labels, positions = (data[name] for name in ("tokens", "labels", "position_ids"))
    # every generator is used, so that each step leaves another state of it behind
    random.random(), torch.rand(1)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        torch.rand(1)

    def loss(output):
        total = (output.float().view(-1) * mask.view(-1).float()).sum()
        tokens_seen = mask.sum().to(torch.int)
        return total, tokens_seen, {"lm loss": torch.cat([total.detach().view(1), tokens_seen.view(1).float()])}

    return model(tokens, positions, None, labels=labels), loss


class Notes:
    """Writes what is seen of the state to ``$RECORD<rank>``, and stops the run where it is to stop."""

    def __init__(self, stop_after):
        self.file = open(f"{os.environ['RECORD']}{os.environ['RANK']}", "a", buffering=1)  # noqa: SIM115
        self.stop_after = stop_after

    def write(self, event, **fields):
        self.file.write(json.dumps({"event": event, **fields}) + "\n")

    def of(self, event, model, optimizer, scheduler, iteration):
        from bridge_on_cpu.digests import digest, optimizer_state, rng_state
        from megatron.training import get_args

        self.write(
            event,
            step=int(iteration),
            samples=int(get_args().consumed_train_samples),
            weights=digest([dict(chunk.named_parameters()) for chunk in model]),
            optimizer=digest(optimizer_state(optimizer)),
            scheduler=digest(scheduler.state_dict()),
            rng=rng_state(),
        )

    def install(self):
        """Look from outside: around the loop's functions that begin training and end a step."""
        import importlib

        import torch

        training = importlib.import_module("megatron.training.training")
        train, decide = training.train, training.checkpoint_and_decide_exit
        data = training.build_train_valid_test_data_iterators

        def noted_data(*args, **kwargs):
            # between the load and the data, for a data loader that is made draws a seed from torch's generator
            from bridge_on_cpu.digests import rng_state

            self.write("loaded", rng=rng_state())
            return data(*args, **kwargs)

        def noted_train(step, model, optimizer, scheduler, *args, **kwargs):
            from megatron.training import get_args

            self.of("start", model, optimizer, scheduler, get_args().iteration)
            return train(step, model, optimizer, scheduler, *args, **kwargs)

        def noted_decide(model, optimizer, scheduler, iteration, *args, **kwargs):
            self.of("step", model, optimizer, scheduler, iteration)
            leaves = decide(model, optimizer, scheduler, iteration, *args, **kwargs)
            if iteration == self.stop_after:
                self.write("stopping", step=iteration)
                # No rank dies of another's end while it is still saving.
                torch.distributed.barrier()
                time.sleep(float(os.environ.get("DIE_AFTER_S", "1")))
                os.kill(os.getpid(), signal.Signals[os.environ.get("DIE_BY", "SIGKILL")])
            return leaves

        training.train, training.checkpoint_and_decide_exit = noted_train, noted_decide
        training.build_train_valid_test_data_iterators = noted_data


def main(stop_after):
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    on_cpu()
    notes = Notes(stop_after)
    notes.install()
    config = pretrain_cfg_container_from_args(parse_and_validate_args())
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, model_provider=model_provider)
    notes.write("done")


if __name__ == "__main__":
    import bridge_on_cpu.cuda_as_cpu

    bridge_on_cpu.cuda_as_cpu.install()
    import torch

    torch.set_num_threads(1)
    main(int(sys.argv.pop(1)))
    Path(f"{os.environ['RECORD']}{os.environ['RANK']}.ok").touch()
elif __name__ == "__mp_main__":
    # a spawned writer of an asynchronous save, which asks for its CUDA device
    import bridge_on_cpu.cuda_as_cpu

    bridge_on_cpu.cuda_as_cpu.install()
