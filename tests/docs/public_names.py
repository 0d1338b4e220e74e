"""The public names of the library, one per line.

To write the list anew: `python -m tests.docs.public_names > docs/reference/public_names.txt`.
"""

from __future__ import annotations

import importlib
import sys

PACKAGES = (
    "shardwright",
    "shardwright.checkpoint",
    "shardwright.context",
    "shardwright.grads",
    "shardwright.moe",
    "shardwright.parallel",
    "shardwright.testing",
)


def public_names() -> list[str]:
    """Return `package.name` for everything that a public package exports."""
    modules = [importlib.import_module(package) for package in PACKAGES]
    return sorted(f"{module.__name__}.{name}" for module in modules for name in module.__all__)


if __name__ == "__main__":
    sys.stdout.write("\n".join(public_names()) + "\n")
