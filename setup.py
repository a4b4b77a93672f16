"""What pyproject.toml can't say: the packages are those found, and the start-up folder as one of them.

The folder stays outside the package in the source tree, because Python must never import it as a part of it.

The one library in C copies memory faster than the C library does. It uses nothing of Python, so one build serves every
version; without a compiler it is left out, and the package works without it.
"""

from setuptools import Extension, find_packages, setup

setup(
    ext_modules=[
        Extension(
            "mlflashpoint.core._stream",
            ["mlflashpoint/core/_stream.c"],
            optional=True,
            py_limited_api=True,
            extra_compile_args=["-O2"],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    packages=[*find_packages(include=["mlflashpoint", "mlflashpoint.*"]), "mlflashpoint.sitecustomize"],
    package_dir={"mlflashpoint.sitecustomize": "sitecustomize"},
)
