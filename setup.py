"""The one thing pyproject.toml cannot say: every sub-package is found, and `recipes/` ships inside the package."""

from __future__ import annotations

from setuptools import find_packages, setup


setup(
    packages=[*find_packages(include=["hf_parallel", "hf_parallel.*"]), "hf_parallel.recipes_data"],
    package_dir={"hf_parallel.recipes_data": "recipes"},
    package_data={
        "hf_parallel": ["py.typed"],
        "hf_parallel.planner": ["*.json"],
        "hf_parallel.recipes_data": ["*.yaml", "train.py"],
    },
)
