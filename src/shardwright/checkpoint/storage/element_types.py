"""Element types by name: in the manifest torch's names, in the files those of the safetensors format."""

from __future__ import annotations

import torch

from shardwright.errors import CheckpointError

STANDARD = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
# No name in the format, or one that its readers do not know yet (F8_E8M0), or that counts other elements than
# torch does (F4: two of them are one float4_e2m1fn_x2).
_AS_BYTES = (
    "complex128",
    "complex32",
    "bcomplex32",  # from torch 2.14 on
    "float8_e8m0fnu",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
    "bits16",
    "bits8",
    "bits1x8",
    "bits2x4",
    "bits4x2",
)

DTYPES = {name: getattr(torch, name) for name in (*STANDARD, *_AS_BYTES) if hasattr(torch, name)}
ITEMSIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FROM_STANDARD = {standard: name for name, standard in STANDARD.items()}


def name_of(dtype: torch.dtype) -> str:
    """`float32` for torch.float32.

    Raises: CheckpointError: a dtype that torch itself does not copy: quantized ones, whose scale is no part
        of their elements, and integers of less than a byte (`int4`).
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise CheckpointError(
            f"a checkpoint holds no {str(dtype).removeprefix('torch.')}, which torch does not copy: save "
            f"{_instead(dtype)}; what is held: {', '.join(DTYPES)}"
        ) from None


def _instead(dtype: torch.dtype) -> str:
    if str(dtype).removeprefix("torch.").startswith(("qint", "quint")):
        return "its int_repr(), and its scale and zero point beside it"
    return "its view(torch.uint8)"


def in_file(name: str, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """Dtype and shape that stand in a file's header; what the format has no name for are bytes there."""
    standard = STANDARD.get(name)
    return (standard, list(shape)) if standard else ("U8", [*shape, ITEMSIZES[name]])


def from_file(standard: str) -> str | None:
    """Our name of a safetensors dtype; None: it is not known here."""
    return _FROM_STANDARD.get(standard)


def in_order(x: torch.Tensor) -> torch.Tensor:
    """The elements one after another: torch turns a large matrix by a kernel that 4 bits have not."""
    if x.dtype != torch.float4_e2m1fn_x2 or x.is_contiguous():
        return x.contiguous()
    return x.view(torch.uint8).contiguous().view(x.dtype)
