"""Which packages the agent watches for, and which table of patches each of them loads.

The start-up path loads this module in every Python process of a job, so it imports nothing. The tables themselves
name exact modules and targets; they are loaded when the first module of a watched package is imported.
"""

#: (framework, packages whose first import loads the table, module that holds ``PATCHES``)
FRAMEWORKS = (
    ("bridge", ("megatron", "nvidia_resiliency_ext"), "mlflashpoint.agent.bridge"),
    ("megatron_lm", ("megatron",), "mlflashpoint.agent.megatron_lm"),
    ("lightning", ("lightning", "pytorch_lightning"), "mlflashpoint.agent.lightning"),
    ("nemo", ("nemo",), "mlflashpoint.agent.nemo"),
    ("nemo_rl", ("nemo_rl", "ray"), "mlflashpoint.agent.nemo_rl"),
    ("dcp", ("torch",), "mlflashpoint.agent.dcp"),
)
