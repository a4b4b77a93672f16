"""NeMo 2.0, and recipes that import the library: the wrapper, the callback, CheckpointIO and AutoResume.

``wrapper_util.wrap_trainer_and_auto_resume_with_mlflashpoint`` puts the rest in place. Under the agent a recipe needs
none of this: ``adapter.lightning`` saves and resumes NeMo's MegatronStrategy through ``megatron_kind``.
"""
