"""Text and pictures of layouts, for people."""

import sys
from types import ModuleType
from typing import Any

from shardwright.explain.op import Explanation, explain
from shardwright.explain.picture import Picture, visualize
from shardwright.explain.table import LayoutTable, layout_table

__all__ = ["Explanation", "LayoutTable", "Picture", "explain", "layout_table", "visualize"]


class _Layer(ModuleType):
    """This layer is called like the function `sw.explain`: imported first, it is what that name finds."""

    def __call__(self, *args: Any, **kwargs: Any) -> Explanation:
        return explain(*args, **kwargs)


sys.modules[__name__].__class__ = _Layer
