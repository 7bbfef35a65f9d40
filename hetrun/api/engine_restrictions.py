"""What an engine's process may still do, once it knows its model: ADR 69 and docs/security.md say why.

It reads Python, libraries, the devices and its model; it writes hetrun's cache and the files that options
name; it has no network. Native code that a file or a prompt has broken cannot do more than that. This runs
before other threads begin, and before anything of the model is read.
"""

from __future__ import annotations

import glob
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from hetrun.api.model_path import model_path
from hetrun.config import Settings, config_file, dirs
from hetrun.errors import HetrunError, OptionError
from hetrun.system import entry_points
from hetrun.system.sandbox import landlock, seccomp
from hetrun.system.sandbox.inside import SWITCH
from hetrun.system.sandbox.kernel import Unrestricted
from hetrun.system.sandbox.landlock import (
    DEVICE,
    IOCTL_DEV,
    MAKE_FIFO,
    MAKE_SOCK,
    READ,
    READ_DIR,
    READ_FILE,
    RUN,
    WRITE,
)

log = logging.getLogger(__name__)

SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/nix/store", "/gnu/store", "/snap")
# Of /etc only what libraries look up; it also has keys.
LOOKED_UP = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload", "localtime", "timezone", "nsswitch.conf"),
    *("passwd", "group", "hosts", "os-release", "locale.alias", "machine-id", "mime.types"),
    *("OpenCL", "vulkan", "glvnd", "nvidia", "nv_tegra_release", "alternatives", "python3", "cufile.json"),
)
LIBRARIES = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "CONDA_PREFIX", "VIRTUAL_ENV")
GPU = ("/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/dri", "/dev/kfd", "/dev/nvhost*", "/dev/nvmap", "/dev/dxg")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", *GPU)
# Where libraries of a GPU keep programs that they have compiled.
KEPT_BY_LIBRARIES = (("CUDA_CACHE_PATH", "~/.nv"), ("CUPY_CACHE_DIR", "~/.cupy"))
# What a GPU's driver and its libraries read and ask differs from one to the next, and one that misses
# something says only that there is no GPU: reading is free where there is one, and writing to devices.
EVERYTHING = (("/", RUN | IOCTL_DEV), ("/dev", DEVICE), ("/proc", DEVICE), ("/sys", DEVICE))
KINDS = (".gguf", ".safetensors", ".json", ".jinja", ".model", ".txt", ".md", ".bin")
MOST_FILES = 10_000  # of a folder
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # of Hugging Face's cache, and of Ollama's
Grant = tuple[str, int]


def restrict(options: Mapping[str, object]) -> None:
    """Restrict this process for the engine of these options, as far as this kernel can.

    OptionError: it was asked for and is not possible. Other errors say what is wrong with the model's name.
    """
    settings = Settings.resolve(environ=None, **options)
    if settings.sandbox == "off":
        os.environ[SWITCH] = "off"  # for the processes that it starts
        log.debug("the engine's process is not restricted: --sandbox off")
        return
    model = _model(settings)
    if has_gpu():
        _make_devices()
    # Backends of other packages may spread over several machines, and keep what they like where they like.
    are_strangers = any(not p.is_ours for p in entry_points.points("backends").values())
    faults = [*_of_files(settings, model, are_strangers), *_of_calls(are_strangers)]
    for fault in faults:
        log.debug("the engine's process is not restricted by %s", fault)
    if faults and settings.sandbox == "on":
        raise OptionError(f"--sandbox on is not possible here: {'; '.join(faults)}")


def _of_files(settings: Settings, model: Path | None, network: bool) -> Iterator[str]:
    own = list(_own(settings))
    temporary = [] if _moved_temporary_files() and not network else [tempfile.gettempdir()]
    sockets = MAKE_SOCK | MAKE_FIFO if network else 0
    grants = landlock.merged(
        [(path, RUN) for path in (*SYSTEM, *_of_python())],
        [(f"/etc/{name}", READ) for name in LOOKED_UP],
        [(path, READ) for path in ("/proc", "/sys", "/dev", "/run/nvidia-persistenced")],
        [("/proc/self", READ | WRITE), ("/dev/shm", WRITE), ("/dev/hugepages", WRITE)],
        [(path, DEVICE) for pattern in DEVICES for path in glob.glob(pattern)],
        [(path, WRITE | sockets) for path in temporary],
        own,
        [] if model is None else of_model(model),
        EVERYTHING if has_gpu() else (),
    )
    try:
        version = landlock.restrict(grants, network=network, others=network or has_gpu())
        log.debug("the engine's process reaches %d places (Landlock, version %d)", len(grants), version)
    except Unrestricted as error:
        yield str(error)


def _of_calls(network: bool) -> Iterator[str]:
    try:
        if network:
            seccomp.without_foreign_calls()
        else:
            # Libraries of a GPU ask a service of its driver through a socket of this kind.
            seccomp.without_network((seccomp.AF_UNIX,) if has_gpu() else ())
    except Unrestricted as error:
        yield str(error)


def has_gpu() -> bool:
    """Whether there are devices of a GPU's driver."""
    return any(glob.glob(pattern) for pattern in GPU)


def _make_devices() -> None:
    """Let the driver make what is missing of its devices: its program for that needs the rights of its file,
    which no program gets after this."""
    if os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/nvidia-uvm"):
        from subprocess import DEVNULL, TimeoutExpired, run  # on use: after a start of the machine

        with suppress(OSError, TimeoutExpired):
            command = ["nvidia-modprobe", "-c", "0", "-u"]
            run(command, check=False, timeout=10, stdout=DEVNULL, stderr=DEVNULL)


def _model(settings: Settings) -> Path | None:
    """Where the model lies; one that is only on the hub is brought now, while there is a network."""
    if settings.model is not None:
        return model_path(settings)
    with suppress(HetrunError):  # opening it says what is wrong
        return model_path(settings)
    return None


def _moved_temporary_files() -> bool:
    """Files of this process alone, in hetrun's own folder: what others have in /tmp is not for it."""
    try:
        folder = dirs().cache / "tmp"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, HetrunError):
        return False
    if not os.access(folder, os.W_OK):
        return False
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    return True


def _own(settings: Settings) -> Iterator[Grant]:
    """hetrun's folders, and what options name."""
    with suppress(HetrunError):
        found = dirs()
        yield from ((str(found.cache), WRITE), (str(found.config), READ), (str(found.data), READ))
        yield str(config_file()), READ
    if settings.slot_save_path:
        yield str(settings.slot_save_path.expanduser()), WRITE
    if settings.prompt_cache:  # written beside, and renamed
        yield str(settings.prompt_cache.expanduser().absolute().parent), WRITE
    named = (settings.plan, settings.chat_template, settings.mmproj)
    yield from ((os.path.expanduser(str(path)), READ) for path in named if path)
    if settings.spec.startswith("draft:"):
        yield from of_model(Path(settings.spec.removeprefix("draft:")).expanduser())
    for variable, usual in KEPT_BY_LIBRARIES if has_gpu() else ():
        folder = os.environ.get(variable) or os.path.expanduser(usual)
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            yield folder, WRITE
    for compiled in (os.environ.get("NUMBA_CACHE_DIR"), os.path.expanduser("~/.cache/numba")):
        if compiled:
            yield compiled, WRITE


def _of_python() -> Iterator[str]:
    """Where modules and libraries may be imported from, now and later."""
    yield from {
        sys.prefix,
        sys.exec_prefix,
        sys.base_prefix,
        os.path.dirname(os.path.realpath(sys.executable)),
    }
    yield from (path for path in sys.path if os.path.isabs(path))
    for variable in LIBRARIES:
        yield from (path for path in os.environ.get(variable, "").split(os.pathsep) if os.path.isabs(path))
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):  # setuptools' finders of packages in their own folders
            yield from map(str, getattr(module, "MAPPING", {}).values())
    here = Path(__file__).parent.parent
    yield str(here)
    with os.scandir(here) as entries:  # in a checkout, some of hetrun's folders are links
        yield from (entry.path for entry in entries if entry.is_symlink())


def of_model(path: Path) -> Iterator[Grant]:
    """A model's files: a folder as a whole; beside a file, those of the same kinds only, as it may lie
    anywhere."""
    real = Path(os.path.realpath(path))
    if os.path.isdir(path):
        yield str(path), READ
        yield from ((entry, READ_FILE) for entry in _entries(path))
    else:
        yield str(real), READ_FILE
        yield from _beside(path.absolute().parent)
        if real.parent.name == BLOBS:  # a store of models only
            yield str(real.parent.parent), READ
        elif real.parent != path.absolute().parent:
            yield from _beside(real.parent)
    for folder in _above(path.absolute()):
        yield from _beside(folder)


def _beside(folder: Path) -> Iterator[Grant]:
    yield str(folder), READ_DIR
    yield from ((path, READ_FILE) for path in _entries(folder) if path.endswith(KINDS))


def _entries(folder: Path) -> Iterable[str]:
    """Files and links to files; a rule is for what they lead to."""
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in islice(entries, MOST_FILES) if entry.is_file()]
    except OSError:
        return []


def _above(path: Path) -> Iterator[Path]:
    """Of a repository in Hugging Face's cache, the folders up to where it begins: towers may lie there."""
    parts = path.parts
    if SNAPSHOTS in parts[:-2]:
        begin = len(parts) - parts[::-1].index(SNAPSHOTS)  # after which the revision stands
        yield from (Path(*parts[:end]) for end in range(begin + 1, len(parts) - 1))
