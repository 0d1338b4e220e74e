"""Models that `transformers` wrote: loaded in slices onto placed models, changed, and read back by it."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as t
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright import Shard, distribute_module
from shardwright.checkpoint import join, load_hf, rename, save_hf, stack, transpose
from shardwright.errors import CheckpointError
from shardwright.parallel import parallelize_fsdp, parallelize_replicate
from shardwright.testing import rank_mesh
from tests.tiers import only

Ranks = Callable[..., list[Any]]
IDS = torch.arange(14).reshape(2, 7) % 13


def families() -> dict[str, Any]:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    return {
        "llama": (t.LlamaForCausalLM, t.LlamaConfig(**small, intermediate_size=48, num_key_value_heads=2)),
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61)),
        "qwen3 moe": (
            t.Qwen3MoeForCausalLM,
            t.Qwen3MoeConfig(**small, **moe, intermediate_size=48, num_key_value_heads=2),
        ),
        "t5": (
            t.T5ForConditionalGeneration,
            t.T5Config(
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                vocab_size=61,
                decoder_start_token_id=0,
            ),
        ),
    }


EXPERTS = r"(.*\.experts)\."
MAPS = {
    "qwen3 moe": (
        stack(EXPERTS + "gate_up_proj", r"\1.{index}.gate_up_proj"),
        join(r"(.*)\.gate_up_proj", (r"\1.gate_proj.weight", r"\1.up_proj.weight")),
        stack(EXPERTS + "down_proj", r"\1.{index}.down_proj.weight"),
    )
}
PLACES = {"fsdp": (2,), "replicate": (2,), "cut by columns": (2,), "fsdp beside replicate": (2, 2)}


def place(model: nn.Module, how: str) -> None:
    sizes = PLACES[how]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("rep", "dp")[-len(sizes) :])
    if how == "replicate":
        parallelize_replicate(model, mesh)
    elif how == "cut by columns":
        cut = {name: {"dp": Shard(one.dim() - 1)} for name, one in model.named_parameters()}
        distribute_module(model, mesh, cut)
    elif how == "fsdp":
        parallelize_fsdp(model, mesh)
    else:
        from shardwright.parallel import parallelize_hsdp

        parallelize_hsdp(model, mesh, shard_dim="dp")


def inputs(family: str) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "labels": IDS} if family == "t5" else {"input_ids": IDS}


def load_and_export(folder: Path, family: str, how: str) -> dict[str, torch.Tensor]:
    """Load into a model that has no memory yet, compare each tensor, double it, and write it."""
    kind, config = families()[family]
    warnings.simplefilter("ignore")
    wanted = kind.from_pretrained(folder / "in")
    with torch.device("meta"):
        model = kind(config)
    place(model, how)
    buffers = dict(wanted.named_buffers())
    found = load_hf(model, folder / "in", maps=MAPS.get(family, ()), buffers=buffers)
    state = dict(wanted.state_dict())
    for name, one in model.state_dict().items():
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        assert torch.equal(whole, state[name]), name
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(2)
    save_hf(model, folder / "out", maps=MAPS.get(family, ()), max_shard_size=30_000)
    return {"read": found.bytes_read}


@pytest.mark.parametrize(
    ("family", "how"),
    only(
        [("llama", "fsdp"), ("qwen3 moe", "cut by columns"), ("gpt2", "fsdp beside replicate")],
        [(family, how) for family in ("llama", "gpt2", "qwen3 moe", "t5") for how in PLACES],
    ),
)
def test_what_transformers_wrote_is_loaded_in_slices_and_what_is_written_it_reads(
    ranks: Ranks, tmp_path: Path, family: str, how: str
) -> None:
    """The reference is `from_pretrained` on one device, before and after."""
    kind, config = families()[family]
    torch.manual_seed(0)
    model = kind(config).eval()
    model.save_pretrained(tmp_path / "in", max_shard_size="30KB")
    world = 4 if len(PLACES[how]) == 2 else 2
    ranks(world, load_and_export, tmp_path, family, how)
    config.save_pretrained(tmp_path / "out")
    with torch.no_grad():
        seen = set()
        for one in model.parameters():
            assert id(one) not in seen
            seen.add(id(one))
            one.mul_(2)
        again = kind.from_pretrained(tmp_path / "out").eval()
        assert torch.equal(model(**inputs(family)).logits, again(**inputs(family)).logits)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(6, 3))
        self.experts = nn.Parameter(torch.zeros(4, 3, 2))
        self.plain = nn.Parameter(torch.zeros(5))


FUSED = (
    rename(r"(.*)", r"net.\1"),
    join(r"net\.qkv", ("net.q", "net.k", "net.v"), sizes=(3, 2, 1)),
    transpose(r"net\.[qkv]"),
    stack(r"net\.experts", "net.expert.{index}.w"),
    transpose(r"net\.expert\..*"),
)


def load_what_files_lack(folder: Path) -> list[str]:
    """Of a model that makes its tables of positions itself, and of one whose class says nothing of them."""
    sizes = {"vocab_size": 61, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 8}
    config = t.MarianConfig(
        **sizes, **heads, encoder_ffn_dim=20, decoder_ffn_dim=20, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    plain = t.MarianMTModel(config)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(1)
    mesh = rank_mesh((2,), ("tp",))
    model = distribute_module(t.MarianMTModel(config), mesh, {"model.shared.weight": [Shard(0)]})
    load_hf(model, folder)
    pairs = {name: (x.full_tensor(), plain.get_parameter(name)) for name, x in model.named_parameters()}
    model._keys_to_ignore_on_save = model._keys_to_ignore_on_load_missing = []
    with pytest.raises(CheckpointError, match=r"embed_positions\.weight is in no file"):
        load_hf(model, folder)
    return [name for name, pair in pairs.items() if not torch.equal(*pair)]


def test_what_a_class_says_files_lack_stays_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, load_what_files_lack, tmp_path / "hf") == [[], []]


def file_of_fused() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    sizes = {"net.q": (3, 3), "net.k": (3, 2), "net.v": (3, 1), "net.plain": (5,)}
    sizes |= {f"net.expert.{at}.w": (2, 3) for at in range(4)}
    return {name: torch.randn(size) for name, size in sizes.items()}


def load_fused(folder: Path, dims: dict[str, int]) -> dict[str, torch.Tensor]:
    model = Fused()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    distribute_module(model, mesh, {name: {"dp": Shard(dim)} for name, dim in dims.items()})
    load_hf(model, folder, maps=FUSED)
    save_hf(model, folder / "out", maps=FUSED)
    return {name: one.full_tensor() for name, one in model.named_parameters()}


@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (0, 2)])
def test_maps_compose_and_are_read_backwards(ranks: Ranks, tmp_path: Path, dims: tuple[int, int]) -> None:
    """The reference joins, transposes and stacks whole tensors with plain torch."""
    file = file_of_fused()
    save_file(file, tmp_path / "model.safetensors")
    found = ranks(2, load_fused, tmp_path, {"qkv": dims[0], "experts": dims[1], "plain": 0})
    for model in found:
        assert torch.equal(model["qkv"], torch.cat([file[f"net.{n}"].T for n in "qkv"]))
        assert torch.equal(model["experts"], torch.stack([file[f"net.expert.{n}.w"].T for n in range(4)]))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == file.keys()
    assert all(torch.equal(written[name], file[name]) for name in file)


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        (stack("weight", "w.{index}"), "weight is one element"),
        (join("weight", ("a", "b"), dim=1), "says no parts of that"),
        (["weight"], "'weight' is no map: rename"),
        (None, "maps=None is no map"),
    ],
)
def test_a_map_that_says_nothing_of_a_tensor_is_named(tmp_path: Path, maps: Any, words: str) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(CheckpointError, match=f"^[^\n]*{re.escape(words)}"):
        save_hf(model, tmp_path, maps=maps)
    assert not list(tmp_path.iterdir())


def refused(folder: Path, model: nn.Module) -> str:
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_hf(model, folder)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    return str(error.value)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert "bias is in no file" in refused(tmp_path, nn.Linear(3, 2))
    assert "weight is float32[2, 3] in" in refused(tmp_path, nn.Linear(4, 2, bias=False))
    (tmp_path / "empty").mkdir()
    assert "holds neither" in refused(tmp_path / "empty", nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_an_index_that_leads_out_is_refused(tmp_path: Path, name: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    assert "is no file of this folder" in refused(tmp_path, nn.Linear(3, 2)) or not isinstance(name, str)


@pytest.mark.parametrize("cut", [0, 4, 20, 90, -1])
def test_a_file_that_is_cut_is_refused(tmp_path: Path, cut: int) -> None:
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:cut])
    assert str(tmp_path) in refused(tmp_path, nn.Linear(3, 2, bias=False))


def test_files_that_are_there_are_never_replaced(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds model\.safetensors already"):
        save_hf(nn.Linear(3, 2), tmp_path)


def test_elements_are_cast_to_the_model(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(300, 500).bfloat16()}, tmp_path / "model.safetensors")
    model = nn.Linear(500, 300, bias=False)
    load_hf(model, tmp_path)
    assert torch.equal(model.weight, load_file(tmp_path / "model.safetensors")["weight"].float())


def test_a_buffer_without_data_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(3, 2, bias=False)
        model.register_buffer("table", torch.ones(3), persistent=False)
    with pytest.raises(CheckpointError, match="table is a buffer on the meta device"):
        load_hf(model, tmp_path)
    load_hf(model, tmp_path, buffers={"table": torch.full((3,), 5.0)})
    assert model.table.tolist() == [5.0] * 3
    assert model.weight.tolist() == [[1.0] * 3] * 2


def sparse_folder(folder: Path, matrices: int, rows: int) -> int:
    """Files of float64 matrices [rows, 1024] without room on the disk, with an index; their bytes."""
    index = {}
    nbytes = rows * 1024 * 8
    for number in range(matrices):
        name = f"model-{number + 1:05d}-of-{matrices:05d}.safetensors"
        header = {f"{number}.weight": {"dtype": "F64", "shape": [rows, 1024], "data_offsets": [0, nbytes]}}
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + nbytes)
            file.seek(8 + len(text))
            file.write(b"\x00" * 6 + b"\xf0\x3f")  # the first element is 1, the others 0
        index[f"{number}.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return matrices * nbytes


def load_sparse(folder: Path, matrices: int, rows: int) -> tuple[int, float]:
    """Bytes that this rank read, and the sum of its elements, which are bfloat16 here."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        layers = [nn.Linear(1024, rows, bias=False, dtype=torch.bfloat16) for _ in range(matrices)]
        model = distribute_module(nn.Sequential(*layers), mesh, {"*": {"dp": Shard(0)}})
    read = load_hf(model, folder).bytes_read
    return read, sum(one.to_local().sum().item() for one in model.parameters())


@pytest.mark.parametrize(("matrices", "rows"), [(4, 1024), pytest.param(16, 65_536, marks=pytest.mark.slow)])
def test_each_of_four_ranks_reads_its_quarter(ranks: Ranks, tmp_path: Path, matrices: int, rows: int) -> None:
    """32 MiB, and 8 GiB: what the reader asks the system for, counted in bytes."""
    total = sparse_folder(tmp_path, matrices, rows)
    found = ranks(4, load_sparse, tmp_path, matrices, rows, timeout=170)
    assert [read for read, _ in found] == [total // 4] * 4
    assert [sums for _, sums in found] == [float(matrices), 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"tabel": torch.ones(3)}, "names 'tabel', which is no buffer on the meta device"),
        ({"table": torch.ones(9)}, r"float32\[9\] on cpu for table, which is torch.float32\[3\] on meta"),
        ({"table": torch.ones(3, dtype=torch.int64)}, r"int64\[3\] on cpu for table"),
        ({"table": torch.ones(3, device="meta")}, r"float32\[3\] on meta for table"),
    ],
)
def test_values_of_buffers_fit(tmp_path: Path, value: dict[str, torch.Tensor], words: str) -> None:
    """One of a name that is not there was forgotten, any other put in as it was, or as memory of nobody."""
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
        model.register_buffer("table", torch.ones(3), persistent=False)
    with pytest.raises(CheckpointError, match=words):
        load_hf(model, tmp_path, buffers={"table": torch.ones(3), **value})
    assert model.weight.is_meta


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_what_a_cast_would_lose_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Quantized weights mean something else than their elements, and complex ones have two parts."""
    scale = {"weight_scale_inv": torch.ones(1)}
    save_file({"weight": torch.ones(2, 2).to(dtype), **scale}, tmp_path / "model.safetensors")
    assert "weight is " in refused(tmp_path, nn.Linear(2, 2, bias=False))


def test_whole_numbers_are_cast_where_all_of_them_fit(tmp_path: Path) -> None:
    """300 became 44 in uint8, without a word."""
    save_file({"n": torch.tensor([300], dtype=torch.int32)}, tmp_path / "model.safetensors")
    for dtype, fits in ((torch.int64, True), (torch.int32, True), (torch.uint8, False), (torch.bool, False)):
        model = nn.Module()
        model.register_buffer("n", torch.zeros(1, dtype=dtype))
        if fits:
            load_hf(model, tmp_path)
            assert model.n.tolist() == [300]
        else:
            mine = str(dtype).removeprefix("torch.")
            said = f"n is int32[1] in '{tmp_path.name}', {mine}[1] in the model"
            assert said in refused(tmp_path, model)


def test_what_the_files_call_otherwise_is_named_beside_what_is_missing(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    text = refused(tmp_path, nn.Linear(2, 2, bias=False))
    assert 'weight is in no file; nothing here is w, which they hold (see maps=, "auto" for models' in text
    assert "is no folder (nothing is fetched)" in refused(tmp_path / "name", nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("manifest.json", "a checkpoint of this library, which `load` reads"),
        (".metadata", "which `convert` reads"),
        ("adapter_model.safetensors", "give the file 'adapter_model.safetensors'"),
        ("pytorch_model.bin", "writes the pickle 'pytorch_model.bin' anew"),
        ("notes.txt", "name a folder with one of them"),
    ],
)
def test_a_folder_of_something_else_says_what_reads_it(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).touch()
    assert words in refused(tmp_path, nn.Linear(2, 2))


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    """A parser keeps the last of them; which one was meant is not known."""
    save_hf(nn.Linear(2, 2), tmp_path)
    file = tmp_path / "model.safetensors"
    text = file.read_bytes()[8:].replace(b'"bias":', b'"bias":{},"bias":', 1)
    length = text.index(b"}}") + 2
    file.write_bytes(length.to_bytes(8, "little") + text[:length] + bytes(24))
    assert "it names 'bias' twice" in refused(tmp_path, nn.Linear(2, 2))


def test_one_map_needs_no_list_and_a_module_is_a_module(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_hf(model, tmp_path, maps=rename("(.*)", r"m.\1"))
    load_hf(other, tmp_path, maps=rename("(.*)", r"m.\1"))
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(CheckpointError, match="OrderedDict is no module: give the model itself"):
        save_hf(model.state_dict(), tmp_path / "new")  # type: ignore[arg-type]


@pytest.mark.parametrize("most", ["5GB", 0, 1.5])
def test_an_export_that_cannot_be_leaves_no_folder(tmp_path: Path, most: Any) -> None:
    with pytest.raises(CheckpointError, match="is no number of bytes"):
        save_hf(nn.Linear(2, 2), tmp_path / "out", max_shard_size=most)
    with pytest.raises(CheckpointError, match="has no tensors"):
        save_hf(nn.ReLU(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_elements_that_the_format_has_no_name_for_are_refused(tmp_path: Path) -> None:
    """They were written as bytes in one more dim, which nobody reads as what they were."""
    with pytest.raises(CheckpointError, match="weight is complex128, which these files have no name for"):
        save_hf(nn.Linear(2, 2, dtype=torch.complex128), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def save_differing(folder: Path, what: str) -> str:
    """What a save says of a plain module, where something is another on each rank."""
    model, rank = nn.Linear(2, 2), torch.distributed.get_rank()
    for name, one in model.named_parameters():
        nn.init.constant_(one, rank if what == name else 1)
    try:
        save_hf(
            model,
            folder / str(rank) if what == "folder" else folder,
            max_shard_size=8 + rank if what == "max_shard_size" else 64,
            maps=rename("bias", f"b{rank}") if what == "maps" else (),
        )
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["bias", "folder", "max_shard_size", "maps"])
def test_what_differs_between_ranks_is_refused(ranks: Ranks, tmp_path: Path, what: str) -> None:
    for told in ranks(2, save_differing, tmp_path / "out", what):
        assert told.startswith(f"{what} differs between ranks: make it equal first")
    assert not (tmp_path / "out").exists()
    assert ranks(2, save_differing, tmp_path / "out", 0.0) == ["", ""]
