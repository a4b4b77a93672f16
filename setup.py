"""What pyproject.toml can't say: the packages are those found, and the start-up folder as one of them.

The folder stays outside the package in the source tree, because Python must never import it as a part of it.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["mlflashpoint", "mlflashpoint.*"]), "mlflashpoint.sitecustomize"],
    package_dir={"mlflashpoint.sitecustomize": "sitecustomize"},
)
