"""The DDP communication hook: ``attach``, ``HookState`` and ``comm_hook``."""

import fnmatch
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from agentcomm._bypass import FrozenParams, warn_never_called
from agentcomm._exchange import Exchange
from agentcomm._names import Names
from agentcomm._options import Feedback, Options, chunk_log2_of
from agentcomm._rendezvous import Meeting, Members, group_timeout_s, members_of, tell_failure
from agentcomm._tensors import as_real, bucket_strides, check_device, dtype_id
from agentcomm.errors import SpecError, StateError
from agentcomm.specs import Codec, Raw, SparseCodec, parse, with_rounding
from agentcomm.stats import BucketStats, Stats

_RAW = Raw()
# What DDP's Python reducer passes instead of a bucket: a gradient and its parameter.
_Gradient = tuple[torch.Tensor, torch.Tensor]


def _done_future(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def _dense_allreduce(
    group: dist.ProcessGroup, tensor: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Average over the script's own group, as plain DDP does."""
    nranks = dist.get_world_size(group)
    if not tensor.is_sparse:
        tensor.div_(nranks)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()

    def result(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        value = done.value()[0]
        return value.div_(nranks) if value.is_sparse else value

    averaged: torch.futures.Future[torch.Tensor] = future.then(result)
    return averaged


class Handle:
    """A live connection between DDP and the core. Made by ``attach``.

    Its methods may be called from any thread. ``close`` and ``set_codec`` must be called on every
    rank.
    """

    def __init__(
        self, options: Options, module: torch.nn.Module | None, group: dist.ProcessGroup | None
    ) -> None:
        """Meet the other ranks: a collective. See ``attach``."""
        self._options = options
        self._codec = options.codec()
        self._rules = options.rule_codecs()
        self._codec_begin = 0  # the round after the warm-up in which its ramp begins
        self._round = 0
        self._note_ramps()
        self._names = None if module is None else Names(module)
        self._ddp = weakref.ref(module) if isinstance(module, DistributedDataParallel) else None
        self._members: Members = members_of(group)
        self._last_index = -1  # of this round's buckets; -1: it has not begun
        self._nforwards = 0
        self._epoch = 0  # counts changes of codec
        self._layouts: dict[int, tuple[Any, ...]] = {}
        # Parameters by identity; the weak reference tells a new one at an old address.
        self._params: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._complete = False  # every parameter has been seen
        self._frozen: FrozenParams | None = None
        # For DDP's Python reducer: numbers of the parameters, and those that this round has seen.
        self._gradients: dict[int, int] = {}
        self._seen: set[int] = set()
        self._sparse_nbytes = 0
        self._sparse_params: set[int] = set()  # by identity: those that bypass the core
        self._nbuckets = 0
        self._closed = False
        self._exchange: Exchange | None = None
        config = options.config()
        if self._names is not None:
            self._names.check_patterns("rules", self._rules)
            config["parameters"] = f"{len(self._names.of)} of digest {self._names.digest}"
        elif self._rules:
            raise StateError(
                "rules= needs the parameters' names: pass module= to HookState, or use"
                " agentcomm.attach"
            )
        if self._members.nranks > 1:
            timeout_s = options.timeout_s or group_timeout_s(self._members.group)
            self._exchange = Exchange(
                Meeting(self._members, timeout_s),
                config,
                options.seed,
                chunk_log2_of(options.chunk_nbytes),
                8 if self._names is None else self._names.elem_nbytes_max,
            )

    # ---- what users call ------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return this rank's totals since ``attach``.

        Raises:
            StateError: the handle is closed.
        """
        self._check_open()
        if self._exchange is None:
            return Stats(rounds=self._round, buckets=self._nbuckets)
        total = self._exchange.stats()
        per_bucket = []
        for index in sorted(self._layouts):
            row = self._exchange.bucket_stats(index)
            if row is not None:
                keys = ("rounds", "dense_nbytes", "wire_nbytes", "encode_s", "wait_s", "decode_s")
                per_bucket.append(BucketStats(index, *(row[key] for key in keys)))
        chunk_nbytes = 1 << total.pop("chunk_log2")
        return Stats(
            **total,
            residual_norm=self._exchange.residual_norm(),
            sparse_nbytes=self._sparse_nbytes,
            chunk_nbytes=chunk_nbytes,
            per_bucket=tuple(per_bucket),
        )

    def set_codec(self, spec: str | Codec) -> None:
        """Use another codec for the parameters that no rule names, from the next round on.

        The same call must be made on every rank between the same two rounds. What the residuals
        hold is kept; a lossless codec sends it along and clears it. A ramp of the new codec begins
        here.

        Raises:
            SpecError: the spec is wrong. StateError: the handle is closed.
        """
        self._check_open()
        self._codec = with_rounding(parse(spec), self._options.rounding)
        self._codec_begin = max(self._round - self._options.warmup_nrounds, 0)
        self._note_ramps()
        self._epoch += 1

    def reset_residuals(self) -> None:
        """Forget what error feedback has kept back, on this rank."""
        self._check_open()
        if self._exchange is not None:
            self._exchange.clear_residuals()

    def close(self) -> None:
        """Disconnect: a collective. From then on the DDP exchanges dense gradients. Idempotent."""
        self._closed = True
        if self._exchange is not None:
            self._exchange.close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or another ``attach`` has taken the DDP over."""
        return self._closed

    def __repr__(self) -> str:
        """Name the codec, the round and the state."""
        state = "closed" if self._closed else f"round {self._round}"
        return f"<agentcomm.Handle {self._codec} {state}>"

    # ---- what the hook calls --------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the handle is closed; call agentcomm.attach again")

    def count_forward(self) -> None:
        """Note a forward pass that prepares a synchronised backward pass."""
        self._nforwards += 1

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a bucket over the group; the future holds the bucket's buffer."""
        index, last, tensor = bucket.index(), bucket.is_last(), bucket.buffer()
        if index <= self._last_index:
            self._round += 1  # the last backward pass broke off, or DDP left out its last bucket
        round_ = self._round
        self._last_index = -1 if last else index
        self._round += last
        nforwards = min(self._nforwards, 255)
        if last:
            self._nforwards = 0
        self._nbuckets += 1
        if self._exchange is None:
            return _done_future(tensor)
        if tensor.is_sparse:
            self._sparse_nbytes += tensor._nnz() * tensor.element_size()
            self._sparse_params.update(map(id, bucket.parameters()))
            if last:
                self._look_for_frozen()
            return _dense_allreduce(self._members.group, tensor)
        params = bucket.parameters()
        real = as_real(tensor)
        since = round_ - self._options.warmup_nrounds
        key = (self._epoch, self._phase(since), real.dtype, real.numel(), *map(id, params))
        if self._layouts.get(index) != key:
            self._define(index, key, since, params, tensor, real)
        if last:
            self._look_for_frozen()
        return self._exchange.submit(index, round_, nforwards, self._is_absent(), real, tensor)

    def exchange_gradient(self, grad: torch.Tensor, param: torch.Tensor) -> None:
        """Average one parameter's gradient in place.

        That is what DDP's Python reducer asks for (``torch._dynamo.config.optimize_ddp`` is
        ``"python_reducer"``): it has no buckets and does not wait for what a hook returns.
        """
        index = self._gradients.setdefault(id(param), len(self._gradients))
        if index in self._seen:
            self._seen.clear()
            self._round += 1
        self._seen.add(index)
        self._nbuckets += 1
        if self._exchange is None:
            return
        if grad.is_sparse:
            self._sparse_nbytes += grad._nnz() * grad.element_size()
            grad.copy_(_dense_allreduce(self._members.group, grad).wait())
            return
        real = as_real(grad.detach())
        strides = bucket_strides(as_real(param.detach()))
        dense = real
        if real.stride() != strides:
            dense = torch.empty_strided(real.shape, strides, dtype=real.dtype).copy_(real)
        flat = dense.as_strided((dense.numel(),), (1,))
        since = self._round - self._options.warmup_nrounds
        key = (self._epoch, self._phase(since), flat.dtype, flat.numel(), id(param))
        if self._layouts.get(index) != key:
            self._define(index, key, since, [param], flat, flat)
        self._exchange.submit(index, self._round, 0, False, flat, None).wait()
        if dense is not real:
            real.copy_(dense)

    def _phase(self, since: int) -> object:
        """Return what changes when the codecs do: with the warm-up's end, and along a ramp."""
        if since < 0:
            return "warm-up"
        return tuple(codec.ramp_stage(since - begin) for codec, begin in self._ramped)

    def _note_ramps(self) -> None:
        codecs = [(self._codec, self._codec_begin), *((codec, 0) for codec in self._rules.values())]
        self._ramped = [
            (codec, begin)
            for codec, begin in codecs
            if isinstance(codec, SparseCodec) and codec.ramp
        ]

    def _look_for_frozen(self) -> None:
        """Note in the first round, when all buckets are known, and check in every one."""
        if self._complete:
            if self._frozen is not None:
                self._frozen.check()
            return
        self._complete = True
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None and self._names is not None:
            self._frozen = FrozenParams(ddp, self._names.of, {*self._params, *self._sparse_params})

    def _is_absent(self) -> bool:
        """Whether this rank has joined (torch's ``Join``) and must not count in the mean.

        Plain DDP divides by the number of ranks that still train only if
        ``divide_by_initial_world_size`` is off. A joined rank calls the hook with zeros, and
        outside of any backward pass.
        """
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None or getattr(ddp, "_divide_by_initial_world_size", True):
            return False
        return bool(torch._C._current_graph_task_id() == -1)

    def _define(
        self,
        index: int,
        key: tuple[Any, ...],
        since: int,
        params: list[torch.Tensor],
        tensor: torch.Tensor,
        real: torch.Tensor,
    ) -> None:
        """Tell the core a bucket's layout: in the first round, and when DDP has rebuilt them.

        since: rounds since the warm-up; negative while it lasts.
        """
        exchange = self._exchange
        assert exchange is not None
        check_device(tensor, f"bucket {index}")
        dtype = dtype_id(real.dtype)
        if index in self._layouts:  # all layouts are new, since parameters move between buckets
            exchange.reset_buckets()
            self._layouts.clear()
        total, numbers, lane_of, lanes = 0, [], [], []
        for param in params:
            nelems = as_real(param.detach()).numel()
            total += nelems
            numbers.append(self._param_number(param, nelems))
            codec, begin = self._codec_of(param, nelems)
            codec = _RAW if since < 0 else codec.at_round(since - begin)
            lane = self._options.lane(codec)
            if lane not in lanes:
                lanes.append(lane)
            lane_of.append(lanes.index(lane))
        if total != real.numel():  # the core takes the layout's word for the size of the memory
            raise StateError(
                f"bucket {index} has {real.numel()} elements and its parameters have {total}:"
                " agentcomm does not know this form of bucket"
            )
        exchange.define_bucket(index, dtype, numbers, lane_of, lanes)
        self._layouts[index] = key

    def _param_number(self, param: torch.Tensor, nelems: int) -> int:
        known = self._params.get(id(param))
        if known is not None and known[0]() is param:
            return known[1]
        if self._complete and id(param) not in self._sparse_params:
            raise StateError(
                "a bucket holds parameters that this state has not seen in its first round: one"
                " HookState"
                " serves one DistributedDataParallel module; make another for each"
            )
        assert self._exchange is not None
        number = self._exchange.add_param(nelems)
        self._params[id(param)] = (weakref.ref(param), number)
        return number

    def _codec_of(self, param: torch.Tensor, nelems: int) -> tuple[Codec, int]:
        """Return a parameter's codec, and the round after the warm-up in which it began."""
        names = [] if self._names is None else self._names.of.get(id(param), [])
        for pattern, codec in self._rules.items():
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                return codec, 0
        is_small = nelems < self._options.min_compress_nelems
        return (_RAW, 0) if is_small else (self._codec, self._codec_begin)

    def residual(self, param: torch.Tensor) -> torch.Tensor:
        """Return a copy of what this rank owes of a parameter (error feedback).

        Shapes:
            param: a parameter of the module.
            returns: as param, float32; as ``torch.view_as_real`` of a complex one. The owner's part
                is included, times the number of ranks, so that the mean over ranks is what the
                group owes.

        Raises:
            StateError: the handle is closed or the parameter was in no bucket yet.
        """
        self._check_open()
        known = self._params.get(id(param))
        if self._exchange is None or known is None:
            raise StateError("no bucket has held this parameter yet; run a backward pass first")
        real = as_real(param.detach())
        flat = self._exchange.residual(known[1], real.numel())
        return flat.as_strided(real.shape, bucket_strides(real))


class HookState:
    """State of the hook, for torch's two-argument form.

    It meets the other ranks in the first round. It pickles without its handle, and serves one DDP.

    Args:
        spec: the codec, for example "int8".
        module: the DDP or its module: needed for ``rules``, since a hook sees no names.
        group: the DDP's process group; None is WORLD.
        options: the keywords of ``attach``.

    Raises:
        SpecError: an option is out of range.

    Example:
        state = agentcomm.HookState("int8")
        ddp.register_comm_hook(state, agentcomm.comm_hook)
    """

    def __init__(
        self,
        spec: str | Codec = "int8",
        module: torch.nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.options = Options(spec, **options)
        if self.options.rules and module is None:
            raise StateError(
                "rules= needs the parameters' names: pass module= to HookState, or use"
                " agentcomm.attach"
            )
        self._module = module
        self._group = group
        self._handle: Handle | None = None
        self._delegate: tuple[object, Callable[..., Any]] | None = None
        self.was_called = False
        self.after_round: Callable[[], None] | None = None

    @property
    def handle(self) -> Handle:
        """The handle.

        Raises:
            StateError: before the first round.
        """
        if self._handle is None:
            raise StateError("the state has no handle yet: it connects in the first backward pass")
        return self._handle

    def bind(self, handle: Handle) -> None:
        """Use this handle; an older one is closed."""
        if self._handle is not None:
            self._handle.close()
        self._handle = handle

    def delegate(self, state: object, hook: Callable[..., Any]) -> None:
        """Let another hook do the work from now on: a collective, since the handle is closed.

        torch lets a DDP have one hook, for good; so this one stays, and calls the other.
        """
        self._delegate = (state, hook)
        if self._handle is not None:
            self._handle.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: the handle and the group."""
        return {
            "options": self.options,
            "_module": None,
            "_group": None,
            "_handle": None,
            "_delegate": None,
            "was_called": False,
            "after_round": None,
        }

    def exchange(self, bucket: GradBucket | _Gradient) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; connect first if need be."""
        self.was_called = True
        if self._delegate is not None:
            state, hook = self._delegate
            delegated: torch.futures.Future[torch.Tensor] = hook(state, bucket)
            return delegated
        handle = self._handle
        if handle is None:
            handle = self._handle = _make_handle(self.options, self._module, self._group)
            self._module = None  # the handle has the names; nothing here keeps the module alive
        if isinstance(bucket, tuple):
            grad, param = bucket
            if handle.closed:
                grad.copy_(_dense_allreduce(self._open_group(), grad).wait())
            else:
                handle.exchange_gradient(grad, param)
            return _done_future(grad)
        if handle.closed:
            return _dense_allreduce(self._open_group(), bucket.buffer())
        future = handle.exchange(bucket)
        if self.after_round is not None and bucket.is_last():
            self.after_round()
        return future

    def _open_group(self) -> dist.ProcessGroup:
        group = self._group if self._group is not None else dist.group.WORLD
        assert group is not None  # DDP has one
        return group


@torch.compiler.disable  # type: ignore[untyped-decorator]
def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a gradient bucket: the hook for ``register_comm_hook(state, agentcomm.comm_hook)``.

    Args:
        state: a ``HookState``.
        bucket: DDP's bucket.

    Returns:
        A future of the bucket's buffer, holding the mean over the group.

    Raises:
        TypeError: the state is no HookState.
        MismatchError, PeerError: in ``backward()``, on every rank.
    """
    if not isinstance(state, HookState):
        raise TypeError(
            "the state of agentcomm.comm_hook is an agentcomm.HookState, not"
            f" {type(state).__name__}"
        )
    return state.exchange(bucket)


def _make_handle(
    options: Options, module: torch.nn.Module | None, group: dist.ProcessGroup | None
) -> Handle:
    """Make a handle; if this rank cannot, tell the others, who are waiting for it."""
    try:
        return Handle(options, module, group)
    except (SpecError, StateError, TypeError, ValueError, AttributeError) as error:
        # These come before the meeting; what comes in it, the others learn there.
        tell_failure(group, error)
        raise


# The states that attach has registered, by DDP. DDP cannot unregister a hook, so a second attach
# goes to the first one's state.
_states: "weakref.WeakKeyDictionary[DistributedDataParallel, HookState]" = (
    weakref.WeakKeyDictionary()
)


def attach(
    ddp: DistributedDataParallel,
    spec: str | Codec = "int8",
    *,
    chunk_nbytes: int | str = "auto",
    feedback: Feedback = "auto",
    rules: Mapping[str, str | Codec] | None = None,
    min_compress_nelems: int = 1024,
    warmup_nrounds: int = 0,
    rounding: str | None = None,
    seed: int = 0,
    timeout_s: float | None = None,
    group: dist.ProcessGroup | None = None,
    name: str | None = None,
) -> Handle:
    """Send a DDP module's gradients compressed: a collective of the DDP's group.

    Args:
        ddp: the module; its parameters on the CPU. What torch.compile or Lightning Fabric has
            made of one will do.
        spec: the codec of all parameters that no rule names: "raw", "fp16", "bf16", "fp8", "int8",
            "int4", "ternary", "sign", "topk:FRAC", "randk:FRAC", "topk:FRAC+int8", with options as
            in "int8[block=128]".
        chunk_nbytes: dense bytes that travel together, or "auto": from measurements. Does not show
            in the results. Group rank 0's counts.
        feedback: error feedback: True, False or "auto" (what suits the codec). It costs 4 bytes per
            parameter; "bf16" is "auto" at 2 bytes, what is owed being rounded stochastically.
        rules: codecs by pattern (``fnmatch``) of the parameter's name, as
            ``ddp.module.named_parameters()`` has it; the first match wins.
        min_compress_nelems: smaller parameters that no rule names go raw.
        warmup_nrounds: the first rounds go raw.
        rounding: "stochastic": all codecs that can round so do it, those with ``rounding=nearest``
            too, which is the default and the same as saying nothing. "nearest": as the specs say.
        seed: of stochastic rounding.
        timeout_s: seconds until a silent rank is an error; None: the group's timeout.
        group: must be the DDP's group if given.
        name: goes into what identifies the handle's frames; the same on every rank.

    Returns:
        The handle. The DDP keeps it; it does not keep the DDP.

    Raises:
        TypeError: ddp is no DistributedDataParallel; FSDP is not supported yet.
        SpecError: an option is out of range, or a pattern of ``rules`` matches no parameter.
        StateError: torch.distributed is not initialised, another hook is registered, or the
            optimizer runs inside backward.
        MismatchError: other settings on another rank; on every rank.
        PeerError: another rank did not call attach within the timeout.

    Determinism:
        Results depend on the spec, rules, seed, number of ranks, bucket layout and round, on
        nothing that is measured.
    """
    ddp = _ddp_inside(ddp)
    ddp_group = ddp.process_group
    try:
        options = Options(
            spec=spec,
            chunk_nbytes=chunk_nbytes,
            feedback=feedback,
            rules=_checked_rules(rules),
            min_compress_nelems=min_compress_nelems,
            warmup_nrounds=warmup_nrounds,
            rounding=rounding,
            seed=seed,
            timeout_s=timeout_s,
            name=name,
        )
        _check_attachable(ddp, group)
    except Exception as error:  # whatever it is, the others must not wait for this rank
        tell_failure(ddp_group, error)
        raise
    handle = _make_handle(options, ddp, ddp_group)
    state = _states.get(ddp)
    if state is None:
        state = HookState(spec, group=ddp_group)
        ddp._comm_hooks.clear()  # a copied DDP has the first one's state there
        ddp.register_comm_hook(state, comm_hook)
        _states[ddp] = state
        ddp.register_forward_pre_hook(_ForwardCounter(ddp, state))
        weakref.finalize(ddp, _close_state, weakref.ref(state))
    state.bind(handle)
    return handle


def _ddp_inside(module: object) -> DistributedDataParallel:
    """Return the DDP that wrappers of frameworks hold.

    Raises:
        TypeError: there is none.
    """
    seen = module
    while not isinstance(seen, DistributedDataParallel):
        inner = getattr(seen, "_orig_mod", None)  # torch.compile's
        inner = getattr(seen, "_forward_module", None) if inner is None else inner  # Fabric's
        if inner is None:
            break
        seen = inner
    if isinstance(seen, DistributedDataParallel):
        return seen
    kinds = [cls.__name__ for cls in type(module).__mro__]
    if "FullyShardedDataParallel" in kinds or "FSDPModule" in kinds:
        raise TypeError(
            "attach takes a DistributedDataParallel module; FSDP exchanges its gradients itself and"
            " is not supported yet: use DistributedDataParallel"
        )
    raise TypeError(
        f"attach takes a DistributedDataParallel module, not {type(module).__name__}; wrap the"
        " model first: ddp = DistributedDataParallel(model)"
    )


def state_of(ddp: DistributedDataParallel) -> HookState | None:
    """Return the state that ``attach`` has registered with a DDP, None before."""
    return _states.get(ddp)


def _checked_rules(rules: object) -> dict[str, str | Codec]:
    """Return the rules as a dict.

    Raises:
        SpecError: they are no mapping of patterns to specs.
    """
    if rules is None:
        return {}
    if not isinstance(rules, Mapping) or not all(isinstance(pattern, str) for pattern in rules):
        raise SpecError(
            f"rules={rules!r} is no mapping of name patterns to specs; write for example"
            ' rules={"*.bias": "raw"}'
        )
    return dict(rules)


def _check_attachable(ddp: DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
    if group is not None and group is not ddp.process_group:
        raise StateError(
            f"group= has ranks {_ranks(group)}, but the DDP was built on another group, with ranks"
            f" {_ranks(ddp.process_group)};"
            " leave group= out, or pass process_group= to DistributedDataParallel"
        )
    # The list ddp._comm_hooks knows no built-in hooks, and a copied DDP has it without the hooks.
    data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    hook = data.get("comm_hook")
    if ddp not in _states and hook:
        raise StateError(
            f"the DDP has a communication hook already ({hook}), and torch allows one; remove that"
            " register_comm_hook call"
        )
    for param in ddp.module.parameters():
        check_device(param, "a parameter")
        if getattr(param, "_in_backward_optimizers", None):
            raise StateError(
                "the optimizer runs inside backward (_apply_optimizer_in_backward), where torch"
                " supports no"
                " communication hook; call optimizer.step() after backward instead"
            )


def _ranks(group: dist.ProcessGroup) -> object:
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, TypeError, ValueError):
        return "none"


class _ForwardCounter:
    """Counts the forward passes that DDP prepares a reduction for, as a forward pre-hook.

    A rank that leaves out a backward pass would else pair its next one with the others' present
    one, unnoticed. A copy, pickled or not, counts nothing: it belongs to no state.
    """

    def __init__(
        self, ddp: DistributedDataParallel | None = None, state: HookState | None = None
    ) -> None:
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._state = None if state is None else weakref.ref(state)

    def __reduce__(self) -> tuple[type["_ForwardCounter"], tuple[()]]:
        return _ForwardCounter, ()

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        if torch.compiler.is_compiling() or self._ddp is None or module is not self._ddp():
            return
        state = None if self._state is None else self._state()
        if state is not None and state._handle is not None and torch.is_grad_enabled():
            if getattr(module, "require_backward_grad_sync", True):
                state._handle.count_forward()


def _close_state(reference: "weakref.ref[HookState]") -> None:
    """Close when the DDP is gone, or the interpreter ends."""
    state = reference()
    if state is not None and state._handle is not None:
        described = repr(state._handle)
        never_called = not state.was_called and not state._handle.closed
        state._handle.close()
        if never_called:
            warn_never_called(described)
