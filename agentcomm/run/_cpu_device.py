"""CUDA on a machine without an accelerator: every device that means a GPU becomes the CPU.

Functions are wrapped where they take a device, and nowhere else: a call that names none runs
torch's own code but for one look at its keywords. ``torch.cuda.is_available()`` stays as it is: a
script that asks does the right thing by itself.
"""

import contextlib
import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

installed = False

_FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted"
    " empty_strided eye from_file full full_like hamming_window hann_window kaiser_window linspace"
    " logspace normal ones ones_like rand rand_like randint randint_like randn randn_like randperm"
    " range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor"
    " sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros"
    " zeros_like"
).split()
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_QUERIES: dict[str, Any] = {
    "current_device": 0,
    "get_device_name": "CPU",
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "memory_allocated": 0,
    "memory_reserved": 0,
}
_NO_OPS = (
    "empty_cache init ipc_collect reset_max_memory_allocated reset_peak_memory_stats set_device"
    " set_stream synchronize"
).split()
_said = False


def is_cuda(device: object) -> bool:
    """Whether a device, as scripts write it, means a GPU."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return getattr(device, "type", None) == "cuda"


def _say() -> None:
    global _said
    if not _said:
        _said = True
        from agentcomm.run._live import note

        note(
            "there is no accelerator: cuda means the CPU here; autocast and GradScaler for cuda are"
            " off, as torch has it then (--device cuda leaves everything alone)"
        )


def _cpu(device: object) -> object:
    """Return the CPU for a GPU, anything else as it is."""
    if not is_cuda(device):
        return device
    _say()
    return "cpu"


def _in_keywords(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Wrap a function whose keywords may name a device."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in names:
            if name in kwargs:
                kwargs[name] = _cpu(kwargs[name])
        return function(*args, **kwargs)

    return wrapper


def _first_or_keyword(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a method whose first argument, or one keyword, may be a device."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_cpu(args[0]), *args[1:])
        if name in kwargs:
            kwargs[name] = _cpu(kwargs[name])
        return function(self, *args, **kwargs)

    return wrapper


def _location(location: object) -> object:
    """Return a map_location of ``torch.load`` that puts what was on a GPU on the CPU."""
    if callable(location):
        return location
    if isinstance(location, dict) or location is None:
        return functools.partial(_restore, location or {})
    return _cpu(location)


def _restore(locations: dict[str, Any], storage: Any, tag: str) -> Any:
    """Put a storage where a dict has it, or where it was: a map_location of ``torch.load``."""
    serialization = importlib.import_module("torch.serialization")
    return serialization.default_restore_location(storage, str(_cpu(locations.get(tag, tag))))


def _without_gpu_backend(backend: object) -> object:
    """Return "gloo" for "nccl", and what is left of "cpu:gloo,cuda:nccl"."""
    if not isinstance(backend, str):
        return backend
    if backend.lower() == "nccl":
        _say()
        return "gloo"
    if ":" in backend:
        pairs = [pair for pair in backend.split(",") if not pair.strip().startswith("cuda:")]
        return ",".join(pairs) if pairs else "gloo"
    return backend


def ddp_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return DDP's arguments (module, device_ids, output_device, ...) without GPUs."""
    for name in ("device_ids", "output_device"):
        if kwargs.get(name) is not None:
            _say()
            kwargs[name] = None
    if any(device is not None for device in args[1:3]):
        _say()
    return (*args[:1], *(None for _ in args[1:3]), *args[3:])


class Event:
    """``torch.cuda.Event`` on the CPU, where everything recorded before is done."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._recorded_s = 0.0

    def record(self, stream: object = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Return milliseconds."""
        return 1e3 * (end_event._recorded_s - self._recorded_s)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return: nothing is under way."""

    def wait(self, stream: object = None) -> None:
        """Return: nothing is under way."""


class Stream:
    """``torch.cuda.Stream`` on the CPU, where work is done in the order of the program."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return: nothing is under way."""

    def wait_event(self, event: Event) -> None:
        """Return: nothing is under way."""

    def wait_stream(self, stream: object) -> None:
        """Return: nothing is under way."""


class Device:
    """``torch.cuda.device``, the context manager: there is one device."""

    def __init__(self, device: object) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


def install(torch: Any, always: bool) -> None:
    """Put the stand-ins in, right after torch was imported.

    Args:
        torch: the module.
        always: even where there is an accelerator.
    """
    global installed
    if not always and torch.accelerator.is_available():
        return
    installed = True
    contexts = importlib.import_module("torch.utils._device")
    contexts._device_constructors()  # keeps them, for ``with torch.device(...):``, as they are now
    _install_in_factories(torch)
    tensor, module = torch.Tensor, torch.nn.Module
    for name in _NEW:
        _replace(tensor, name, lambda function: _in_keywords(function, "device"))
    for owner in (tensor, module):
        _replace(owner, "to", lambda function: _first_or_keyword(function, "device"))
        owner.cuda = _to_cpu
    _replace(module, "to_empty", lambda function: _first_or_keyword(function, "device"))
    tensor.pin_memory = lambda self, device=None: self
    _replace(torch, "set_default_device", _on_first)
    _replace(torch, "load", _load)
    _replace(contexts.DeviceContext, "__init__", lambda f: _first_or_keyword(f, "device"))
    _install_in_cuda(torch.cuda, always)
    _install_in_distributed(torch.distributed.distributed_c10d, torch.distributed)


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    setattr(owner, name, wrap(getattr(owner, name)))


def _install_in_factories(torch: Any) -> None:
    scripted = importlib.import_module("torch.jit._builtins")
    for name in _FACTORIES:
        if hasattr(torch, name):
            op = scripted._find_builtin(getattr(torch, name))
            _replace(torch, name, lambda function: _in_keywords(function, "device"))
            if op is not None:  # torch.jit.script knows functions by identity
                scripted._register_builtin(getattr(torch, name), op)


def _to_cpu(self: Any, device: object = None, *args: object, **kwargs: object) -> Any:
    """``.cuda()`` of tensors and modules."""
    _say()
    return self.to("cpu")


def _on_first(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(device: object) -> Any:
        return function(_cpu(device))

    return wrapper


def _load(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(f: Any, map_location: object = None, *args: Any, **kwargs: Any) -> Any:
        return function(f, _location(map_location), *args, **kwargs)

    return wrapper


def _install_in_cuda(cuda: Any, always: bool) -> None:
    for name in _NO_OPS:
        if hasattr(cuda, name):
            setattr(cuda, name, _returning(None))
    for name, value in _QUERIES.items():
        setattr(cuda, name, _returning(value))
    if always:
        cuda.is_available = lambda: False
        cuda.device_count = lambda: 0
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream()
    cuda.stream = lambda stream: stream or contextlib.nullcontext()
    cuda.device = Device


def _returning(value: object) -> Callable[..., object]:
    def stand_in(*args: object, **kwargs: object) -> object:
        _say()
        return value

    return stand_in


def _install_in_distributed(c10d: Any, distributed: Any) -> None:
    for name in ("init_process_group", "new_group"):
        function = getattr(c10d, name)
        wrapper = _init_process_group(function) if name.startswith("init") else _new_group(function)
        setattr(c10d, name, wrapper)
        setattr(distributed, name, wrapper)


def _init_process_group(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(backend: object = None, *args: Any, **kwargs: Any) -> Any:
        kwargs["device_id"] = None if is_cuda(kwargs.get("device_id")) else kwargs.get("device_id")
        return function(_without_gpu_backend(backend), *args, **kwargs)

    return wrapper


def _new_group(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "backend" in kwargs:
            kwargs["backend"] = _without_gpu_backend(kwargs["backend"])
        elif len(args) > 2:
            args = (*args[:2], _without_gpu_backend(args[2]), *args[3:])
        return function(*args, **kwargs)

    return wrapper
