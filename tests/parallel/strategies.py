"""Ways of placing a model on ranks that hold different sequences: name -> how, and what stays pending."""

from dataclasses import dataclass

from shardwright.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from shardwright.testing.meshes import rank_mesh


@dataclass(frozen=True)
class Strategy:
    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    pending: tuple[str, ...]

    @property
    def world(self):
        product = 1
        for size in self.sizes:
            product *= size
        return product

    @property
    def mesh(self):
        return rank_mesh(self.sizes, self.axes)


STRATEGIES = {
    "replicate": Strategy((2,), ("dp",), ("dp",)),
    "replicate on two axes": Strategy(
        (2, 2), ("dp_replicate", "cp_replicate"), ("dp_replicate", "cp_replicate")
    ),
    "replicate twice": Strategy((2, 2), ("dp_replicate", "cp_replicate"), ("dp_replicate", "cp_replicate")),
    "fsdp": Strategy((2,), ("dp",), ()),
    "fsdp on 3": Strategy((3,), ("dp",), ()),
    "fsdp by blocks": Strategy((2,), ("dp",), ()),
    "fsdp 2-D": Strategy((2, 2), ("dp_replicate", "dp_shard"), ("dp_replicate",)),
    "fsdp 2-D by blocks": Strategy((2, 2), ("dp_replicate", "dp_shard"), ("dp_replicate",)),
    "fsdp 2-D on 2 x 3": Strategy((2, 3), ("dp_replicate", "dp_shard"), ("dp_replicate",)),
    "hsdp": Strategy((2, 2), ("dp_replicate", "dp_cp_shard"), ("dp_replicate",)),
    "hsdp, shard axis first": Strategy((2, 2), ("dp_cp_shard", "dp_replicate"), ("dp_replicate",)),
    "replicate, then fsdp": Strategy((2, 2), ("dp_shard", "cp_replicate"), ("cp_replicate",)),
    "replicate, then fsdp 2-D": Strategy(
        (2, 1, 2), ("dp_replicate", "dp_shard", "cp_replicate"), ("dp_replicate", "cp_replicate")
    ),
}


def place(name, model):
    """Apply the strategy of that name, in place."""
    mesh = STRATEGIES[name].mesh
    if name.startswith("replicate, then fsdp"):
        parallelize_replicate(model, mesh["cp_replicate"])
        rest = mesh["dp_replicate", "dp_shard"] if name.endswith("2-D") else mesh["dp_shard"]
        return parallelize_fsdp(model, rest)
    if name == "replicate twice":
        parallelize_replicate(model, mesh["cp_replicate"])
        return parallelize_replicate(model, mesh["dp_replicate"])
    if name.startswith("hsdp"):
        return parallelize_hsdp(model, mesh)
    if name.startswith("fsdp"):
        if name.endswith("by blocks"):
            parallelize_fsdp(model.norm, mesh)
        return parallelize_fsdp(model, mesh)
    return parallelize_replicate(model, mesh)
