"""A stage as torch's schedules drive it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.functional import reduce_over
from shardwright.compat import SENDS_ALL_GRADIENTS, tree_leaves
from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.agreement import peers_of_layers
from shardwright.parallel.pipeline.batch import Batch, copied
from shardwright.parallel.pipeline.border import FindMesh, arriving, asked, leaving
from shardwright.parallel.pipeline.failing import Failures, gradients, nothing
from shardwright.parallel.pipeline.forward.borders import Borders
from shardwright.parallel.pipeline.forward.hollow import Value, is_hollow
from shardwright.parallel.pipeline.forward.returned import another_branch
from shardwright.parallel.pipeline.forward.run import Run
from shardwright.parallel.pipeline.forward.streams import Streams, mixed
from shardwright.parallel.pipeline.split import Split
from shardwright.placement.base import Replicate
from shardwright.tensor.wrap import as_ours

Caller = Callable[[Run, Batch], Any]
Loss = Callable[[Any, Any], Tensor]


class StageModule(nn.Module):
    """What one stage computes of one micro-batch: what arrived -> what leaves, or the loss.

    An error does not leave it while other stages wait: it is kept in `failures`, and what leaves is zeros.

    Args: call: the model, called for a run; what it returns, None before the last stage. batches: the
        micro-batches of this step.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        stage: int,
        borders: Borders,
        call: Caller,
        find: FindMesh,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model = model
        self.stage, self.last = stage, stage == split.stages - 1
        self.arrives = borders.crossing.get(stage, ())
        self.leaves = borders.crossing.get(stage + 1, ())
        self.leaf_of = {v: borders.leaf(v) for v in (*self.arrives, *self.leaves)}
        self.known, self.wanted = borders.known, borders.made(stage)
        self.earlier = frozenset(borders.earlier(stage))
        self.copied = frozenset(borders.rewritten)
        self.may_change = self.copied.union(*(told.written for told in borders.told.values()))
        self.writes_batch = borders.writes_batch
        self.draws, self.draws_python = borders.draws, borders.draws_python
        self.call, self.find, self.device = call, find, device
        self.mode, self.conductor = split.mode, split.conductor
        self.outside, self.units = split.outside, split.units
        self.hollow = functools.cache(split.hollow_on(device))  # nobody writes into them
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.batches: list[Batch] = []
        self.number = 0
        self.outputs: list[Any] | None = None
        self.loss: Loss | None = None
        self.seed = 0
        self.failures = Failures(stage)

    def examples(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What arrives and what leaves, without memory."""
        came = tuple(self.leaf_of[v].example(self.find) for v in self.arrives)
        if self.last:
            return came, (torch.empty((), device="meta", requires_grad=True),)
        return came, tuple(self.leaf_of[v].example(self.find) for v in self.leaves)

    def forward(self, *arrived: Tensor) -> tuple[Tensor, ...]:
        """The local parts that leave; of the last stage, the loss."""
        try:
            out = self._computed(arrived)
        except BaseException as error:  # noqa: BLE001  the other stages wait for what leaves
            self.failures.add(error)
            served = self.units.served(self.stage, self.anchor)
            return nothing(self.examples()[1], (*arrived, served), self.anchor)
        self.units.done()
        return out

    def _computed(self, arrived: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        batch = self.batches[self.number]
        batch = copied(batch) if self.writes_batch else batch
        received = {
            value: arriving(local, self.leaf_of[value], self.find)
            for value, local in zip(self.arrives, arrived, strict=True)
        }
        handed = {v: self._handed(v, x) for v, x in received.items()}
        run = self._run(handed)
        out = self.call(run, batch)
        self._checked(run)
        if self.last:
            return (self._finished(out, batch[2]),)
        values = {**received, **run.kept}
        missing = [v.call.key for v in self.leaves if v not in values]
        if missing:
            raise ParallelError(another_branch(f"what comes after {missing[0]}"))
        return tuple(leaving(values[v], self.leaf_of[v], self.find, self.anchor) for v in self.leaves)

    def _handed(self, value: Value, x: Tensor) -> Tensor:
        """What own code gets of what arrived: no hook and no write of it may reach what leaves."""
        if value not in self.leaves:
            return x
        return x.clone() if value in self.copied else x.view_as(x)

    def _run(self, received: dict[Any, Tensor]) -> Run:
        seed = mixed(self.seed, self.number) if self.draws else None
        streams = Streams(self.device, seed, python=self.draws_python)
        return Run(
            self.stage,
            received,
            self.known,
            self.earlier,
            self.wanted,
            self.hollow,
            self.mode,
            streams,
            self.outside,
            copied=self.copied,
            versions={value: x._version for value, x in received.items()},
        )

    def _checked(self, run: Run) -> None:
        """Keep for the end of the step what other stages must have done too."""
        self.failures.saw(run.journal)
        fresh = [value for value in run.look() if value not in self.may_change]
        if fresh:
            raise ParallelError(
                f"pipeline: what {min(fresh).call.key} returned is written into in place, and was not when "
                "the borders were learned, at the first step of these shapes\n  fix: write into a new "
                "tensor, or do so in the first step too"
            )
        if run.streams.drew:
            raise ParallelError(
                "pipeline: the model's own code draws random numbers, and drew none when the borders were "
                "learned, at the first step of these shapes; stages would draw different ones\n  fix: draw "
                "in the first step too, or in a layer that one stage has"
            )

    def _finished(self, out: Any, target: Any) -> Tensor:
        """This micro-batch's term of the loss, a plain scalar; zero where there is no loss."""
        if self.outputs is not None:
            if any(is_hollow(x) for x in tree_leaves(out)):
                raise ParallelError(another_branch("what the model returns"))
            self.outputs.append(out)
        if self.loss is None:
            return torch.zeros((), device=self.device)
        term: Any = self._term(self.loss, out, target)
        if any(is_hollow(x) for x in (*tree_leaves(out), term)):
            raise ParallelError(another_branch("what the model returns, or its loss,"))
        if isinstance(term, TorchDTensor):
            # Whole on each rank: where one alone has it (`Owner`), a backward of nothing fails on the others.
            ours = as_ours(term)
            term = ours.redistribute(ours.device_mesh, [Replicate()] * ours.device_mesh.ndim).to_local()
        if not isinstance(term, torch.Tensor) or term.numel() != 1 or term.is_complex():
            raise ParallelError(
                f"pipeline: the loss has to be a real scalar, a sum over tokens, got {term!r:.60}"
            )
        return term

    def _term(self, loss: Loss, out: Any, target: Any) -> Tensor:
        """The loss. A tensor of another stage may be in it where torch does not look: in an object."""
        self.conductor.in_loss = True
        try:
            with self.mode.refused(_not_sent):
                return loss(out, target)
        finally:
            self.conductor.in_loss = False


def _nodes(tensors: Iterable[Any]) -> list[Node]:
    """Where a backward begins or ends for each of them that is in it."""
    begun = filter(_begins, tensors)
    return [x.node if isinstance(x, GradientEdge) else get_gradient_edge(x).node for x in begun]


def _begins(left: Any) -> bool:
    """Does a backward begin at what left? From torch 2.15 on an edge stands for a tensor that was sent."""
    return isinstance(left, GradientEdge) or (isinstance(left, Tensor) and left.requires_grad)


def _without_graph(left: Any) -> Tensor | None:
    return left.detach() if isinstance(left, Tensor) else None


def meet_once(outputs: list[Node], inputs: list[Node], weights: list[Node]) -> bool:
    """Does each weight meet what has arrived, in one node of the graph, and leave by no other way?

    torch's second half begins where a weight meets what the first half has gone through. It forgets one that
    leaves beside all that arrived (what a decoder's stage makes of its own tokens), and goes twice through
    what lies between where there are several.
    """
    below = _order(outputs)
    passed = set(inputs)
    for node in below:
        if any(child in passed for child, _ in node.next_functions):
            passed.add(node)
    met: dict[Node, Node | None] = dict.fromkeys((node for node in outputs if node not in passed), None)
    for node in reversed(below):
        at = node if node in passed else met.get(node)
        for child, _ in node.next_functions:
            if child is not None and child not in passed:
                met[child] = at if met.setdefault(child, at) is at else None
    return all(met.get(weight, weight) is not None for weight in weights)


def _order(outputs: list[Node]) -> list[Node]:
    """The nodes of a graph, each after all that its backward goes to."""
    found: dict[Node, None] = {}
    begun: set[Node] = set()
    stack = list(outputs)
    while stack:
        node = stack[-1]
        ahead = [child for child, _ in node.next_functions if child is not None and child not in begun]
        begun.add(node)
        stack += ahead
        if not ahead:
            found[stack.pop()] = None
    return list(found)


def _not_sent(values: frozenset[Value]) -> NoReturn:
    names = ", ".join(sorted({value.call.key for value in values}))
    raise ParallelError(
        f"pipeline: the loss is computed with tensors of another stage that were not sent: {names}\n  fix: "
        "return what a loss reads from the model, in tuples, lists or dicts; add what it makes of parameters "
        "to their gradients after the step, or in the forwards of the layers that have them"
    )


class Stage(PipelineStage):
    """torch's stage, told which micro-batch it runs; `StageModule` has the arguments of each."""

    def __init__(self, module: StageModule, split: Split) -> None:
        came, leaves = module.examples()
        super().__init__(
            module,
            module.stage,
            split.stages,
            module.device,
            input_args=came,
            output_args=leaves,
            group=split.mesh.get_group(),
        )
        self._peers = peers_of_layers(module.model)
        self._arrived: dict[int, Any] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's, of this micro-batch."""
        module: Any = self.submod
        module.number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """As torch's; where it fails, zeros go back, and the error is told at the end of the step."""
        module: Any = self.submod
        came = self._kept(bwd_chunk_id)[1] if self.has_backward else ()
        try:
            self._leave_out(bwd_chunk_id)
            whole = full_backward or not self._comes_apart(bwd_chunk_id, loss)
            super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)
        except BaseException as error:  # noqa: BLE001  the other stages wait for gradients
            self._failed(error)
            self.bwd_cache[bwd_chunk_id] = ()
        if self.has_backward:
            served = module.failures.error is not None
            self.bwd_cache[bwd_chunk_id] = gradients(came, self.bwd_cache[bwd_chunk_id], served=served)

    def _leave_out(self, number: int) -> None:
        """What left and nobody asks a gradient of begins no backward, as on one device.

        Sharded units run theirs, with zeros: their data ranks gather together. Where layers talk to ranks of
        other data, nobody is none of these ranks.
        """
        module: Any = self.submod
        if self.is_last or not self.has_backward or module.units.are_in(self.stage_index):
            return
        left = self._kept(number)[0]
        self._arrived[number] = arrived = self._retrieve_recv_grads(number)
        flags = asked([grad if _begins(x) else None for x, grad in zip(left, arrived, strict=True)])
        flags = self._over_peers(flags) if self._peers else flags
        self._keep(number, [x if flag else _without_graph(x) for x, flag in zip(left, flags, strict=True)])

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        """As torch's, which from 2.15 on hands each of them out once."""
        if bwd_chunk_id in self._arrived:
            return self._arrived.pop(bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _kept(self, number: int) -> tuple[Sequence[Any], Sequence[Tensor]]:
        """What left of this micro-batch, and what had arrived."""
        own: dict[str, Any] = vars(self)
        if "fwd_cache" in own:
            left, came = own["fwd_cache"][number]
            return left, came
        state = own["_forward_chunk_states"][number]  # from torch 2.15 on
        return state.stage_output_for_backward(), state.input_values

    def _keep(self, number: int, left: list[Any]) -> None:
        """Let a backward begin at these."""
        own: dict[str, Any] = vars(self)
        if "fwd_cache" in own:
            own["fwd_cache"][number] = tuple(left), self._kept(number)[1]
            return
        state = own["_forward_chunk_states"][number]
        state.live_outputs = [x if isinstance(x, Tensor) else None for x in left]
        state.output_grad_edges = tuple(x if isinstance(x, GradientEdge) else None for x in left)

    def _over_peers(self, flags: list[bool]) -> list[bool]:
        """Those that any rank of other data has too, where layers talk to these in their backwards."""
        told = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        for group, axis in self._peers.items():
            told = reduce_over(told, "max", group, axis=axis, reason="gradients that ranks of other data ask")
        return list(map(bool, told.tolist()))

    def _comes_apart(self, number: int, loss: Any) -> bool:
        """Does torch's backward in two halves find every gradient? Of the first stage it is one, and does."""
        if self.is_first or not self.has_backward:
            return True
        outputs, came = self._kept(number)
        left = tree_leaves(loss) if self.is_last else outputs
        return meet_once(_nodes(left), _nodes(came), _nodes(self.submod.parameters()))

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, of which 2.11 has every border require a gradient, also one of integers."""
        metas = getattr(self, "inputs_meta", None)  # of torch 2.11
        with_backward, self.has_backward = self.has_backward, self.has_backward and metas is None
        made = super()._prepare_forward_infra(*args, **kwargs)
        self.has_backward = with_backward
        if metas is not None and with_backward and not self.is_first:
            infos: Any = self.args_recv_info.values()
            for came in infos:
                for info, meta in zip(came, metas, strict=True):
                    info.buffer.requires_grad_(meta.requires_grad)
        return made

    def _create_grad_send_info(self, came: Any) -> Any:
        """As torch's, of which 2.12 sends gradients of integers too, for which nobody waits."""
        made = super()._create_grad_send_info(came)
        if not SENDS_ALL_GRADIENTS:
            return made
        return [to if info.tensor_meta.requires_grad else None for to, info in zip(made, came, strict=True)]

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """As torch 2.11 does, but for the loss, whose dtype is the model's."""
        checks: Any = super()
        if not self.is_last:
            checks._validate_fwd_outputs(outputs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """As torch's, of a backward that is taken apart; nothing where its first half has failed."""
        if bwd_chunk_id not in self.dw_runner:
            return
        try:
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001  the other stages wait
            self._failed(error)

    def _post_metadata_inference_cleanup(self) -> None:
        """No stage ran for its shapes; torch's would forget what sharded parameters have added up."""

    def _failed(self, error: BaseException) -> None:
        """Keep what was raised, which torch wraps, for the end of the step."""
        module: Any = self.submod
        cause = error.__cause__
        wrapped = isinstance(cause, Exception) and isinstance(error, Exception)
        module.failures.add(cause if wrapped and cause is not None else error)
