from collections.abc import Callable
from typing import Any

FIELDS: int
VERSION: int

class Dispatch(classmethod[Any, ..., Any]):
    def __init__(self, dispatch: Callable[..., Any], /, **held: Any) -> None: ...

class Boundary(classmethod[Any, ..., Any]):
    def __init__(self, call: Callable[..., Any], /, **held: Any) -> None: ...

class Block(classmethod[Any, ..., Any]):
    def __init__(self, at_once: Callable[..., Any], /, **held: Any) -> None: ...
