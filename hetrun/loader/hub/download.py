"""Models from the hub into Hugging Face's cache, where other programs find them too.

huggingface-hub knows the hub's interface, tokens and mirrors, and lays the cache out. What it does not do is
go on with a file that an earlier process has begun, and wait for the disk: files are read here, into one
beside the cache's blobs, and each is held against its checksum and synced before it is given its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING
from urllib.parse import quote

from hetrun.errors import UserError, printable
from hetrun.loader.hub.cache import cache_folder, read_ref, repository, snapshot
from hetrun.loader.hub.names import RepositoryModel
from hetrun.loader.hub.select import RepositoryFile, SelectedFiles, choose, with_tower
from hetrun.system.files import make_folder, replace_file, sync_file, sync_names
from hetrun.system.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoSibling

Progress = Callable[[int, int, str], object]  # bytes that are done, of how many, and what is being done

Tell = Callable[[int, str], object]  # the same of one file

LARGE = 8 << 20  # bytes: what is smaller is held against its checksum each time
MOST = 50_000_000_000  # the hub gives files that are larger through a protocol that only the library speaks
SHA256, SHA1, COMMIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{40}")
TRIES, PAUSE_S, TIMEOUT_S = 6, 0.5, 20.0  # of a connection over which nothing comes
PARTIAL = 206
SPARE = 64 << 20  # bytes of the disk that are left free


def offline() -> bool:
    """Whether it was said that nothing may be asked of the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def fetch(
    wanted: RepositoryModel, progress: Progress = lambda done, whole, what: None, pictures: bool = True
) -> tuple[Path, SelectedFiles]:
    """Bring a model here, as far as it is not; the path to open, and its files. With `pictures` its vision
    tower comes too, where the repository has one."""
    with explained(wanted):
        api = _hub()
        commit, files = _commit(api, wanted)
        chosen = choose(files, wanted)
        chosen = with_tower(chosen, files) if pictures else chosen
        missing = [file for file in chosen.all_files if not _has(wanted, commit, file)]
        _check_room(wanted, missing)
        done, whole = 0, sum(file.size for file in missing)
        for file in missing:
            _fetch(api, wanted, commit, file, _behind(progress, done, whole))
            done += file.size
        # Also where all is there: what "main" means is known for the next time without a net.
        _write_ref(wanted, commit)
        paths = [_linked(api, wanted, file) for file in chosen.all_files]
        _sync_names(wanted)
    return (_folder(paths[0], chosen.files[0]) if chosen.is_folder else paths[0]), chosen


def _hub() -> HfApi:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # there is one for all files
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return HfApi(library_name="hetrun")


def _is_plain(name: str) -> bool:
    """Whether a name stays within its repository."""
    return not name.startswith("/") and ".." not in name.split("/") and "\0" not in name


def _file(sibling: RepoSibling) -> RepositoryFile:
    sha256, sha1 = str(sibling.lfs.sha256) if sibling.lfs else "", str(sibling.blob_id)
    return RepositoryFile(
        sibling.rfilename,
        sibling.size or 0,
        sha256 if SHA256.fullmatch(sha256) else "",
        sha1 if not sibling.lfs and SHA1.fullmatch(sha1) else "",
    )


def _commit(api: HfApi, wanted: RepositoryModel) -> tuple[str, list[RepositoryFile]]:
    """What a revision is now, and its files."""
    try:
        info = api.model_info(wanted.repo, revision=wanted.revision, files_metadata=True, timeout=TIMEOUT_S)
        files = [_file(sibling) for sibling in info.siblings or () if _is_plain(sibling.rfilename)]
    except (AttributeError, KeyError, TypeError) as error:  # of the library, where an answer has another form
        raise _no_hub(wanted) from error
    if not COMMIT.fullmatch(str(info.sha)):
        raise _no_hub(wanted)
    return str(info.sha), files


def _no_hub(wanted: RepositoryModel) -> UserError:
    return UserError(f"{wanted.name}: the server does not answer like Hugging Face's hub; check HF_ENDPOINT")


def _folder(path: Path, file: RepositoryFile) -> Path:
    return path.parents[len(Path(file.name).parts) - 1]


def _has(wanted: RepositoryModel, commit: str, file: RepositoryFile) -> bool:
    return _is_whole(repository(wanted.repo) / "snapshots" / commit / file.name, file)


def _is_whole(path: Path, file: RepositoryFile) -> bool:
    """Whether a file is there. The library does not sync what it downloads: after a power cut a file of the
    right size may hold zeros."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return file.size >= LARGE or not file.checksum or _checksum(path, file) == file.checksum


def _check_room(wanted: RepositoryModel, missing: list[RepositoryFile]) -> None:
    """Say before anything is read that the disk will not hold it."""
    needed = sum(max(0, file.size - _begun(wanted, file)) for file in missing)
    folder = cache_folder()
    make_folder(folder)
    free = shutil.disk_usage(folder).free
    if needed + SPARE > free:
        raise UserError(
            f"{wanted.name} needs {format_bytes(needed)} more, but the disk of {folder} has only "
            f"{format_bytes(free)} "
            "free: free some space, or choose another folder with HF_HOME"
        )


def _behind(progress: Progress, begin: int, whole: int) -> Callable[[int, str], object]:
    return lambda done, what: progress(begin + done, whole, printable(what))


# --- one file


def _partial(wanted: RepositoryModel, file: RepositoryFile) -> Path:
    return repository(wanted.repo) / "blobs" / f"{file.checksum}.hetrun-incomplete"


def _begun(wanted: RepositoryModel, file: RepositoryFile) -> int:
    path = _partial(wanted, file)
    return path.stat().st_size if file.checksum and path.exists() else 0


def _fetch(api: HfApi, wanted: RepositoryModel, commit: str, file: RepositoryFile, tell: Tell) -> None:
    """Have a file among the cache's blobs. Others are left to the library, which brings them when they are
    linked."""
    blob = repository(wanted.repo) / "blobs" / file.checksum
    if not file.checksum or file.size > MOST or _is_whole(blob, file):
        return
    with _alone(_partial(wanted, file)) as partial:
        if partial is None or _is_whole(blob, file):  # another process has brought it meanwhile
            return
        was_begun = partial.stat().st_size > 0
        while True:
            _read(api, wanted, commit, file, partial, tell)
            tell(file.size, f"checking {file.name}")
            if _checksum(partial, file) == file.checksum:
                break
            if not was_begun:
                partial.unlink()
                raise UserError(
                    f"{wanted.name}: the download of {printable(file.name)} does not match the hub's "
                    "checksum and was removed: pull it again"
                )
            os.truncate(partial, 0)  # what was there before may be what a power cut has left of it
            was_begun = False
        sync_file(partial)
        partial.replace(blob)


def _read(
    api: HfApi, wanted: RepositoryModel, commit: str, file: RepositoryFile, partial: Path, tell: Tell
) -> None:
    """Read what is missing of a file; where the connection breaks off, go on, as long as anything comes."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(token=api.token, library_name="hetrun")
    url = f"{api.endpoint}/{wanted.repo}/resolve/{commit}/{quote(file.name)}"
    left = TRIES
    with partial.open("r+b", buffering=0) as into:
        size = into.seek(0, os.SEEK_END)
        while size != file.size:
            begun = size = size if size < file.size else 0
            try:
                for size in _more(url, headers, into, begun):
                    tell(size, file.name)
            except HfHubHTTPError:
                raise
            except Exception as error:
                left = TRIES if size > begun else left - 1
                if not left or not _is_of_connections(error):
                    raise
                sleep(PAUSE_S)
            else:
                left -= size == begun
                if not left:
                    raise UserError(
                        f"{wanted.name}: the download of {printable(file.name)} ended early: pull it again"
                    )


def _more(url: str, headers: Mapping[str, str], into: io.FileIO, begun: int) -> Iterator[int]:
    """Read on after this many bytes; the size of the file each time it grows."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    asked = {**headers, "Range": f"bytes={begun}-"} if begun else dict(headers)
    # What is compressed on its way cannot be gone on with.
    asked["Accept-Encoding"] = "identity"
    with get_session().stream(
        "GET", url, headers=asked, timeout=TIMEOUT_S, follow_redirects=True
    ) as response:
        hf_raise_for_status(response)
        into.truncate(begun if response.status_code == PARTIAL else 0)
        size = into.seek(0, os.SEEK_END)
        for part in response.iter_bytes():
            view = memoryview(part)
            while view:
                view = view[into.write(view) :]
            size += len(part)
            yield size


def _is_of_connections(error: Exception) -> bool:
    """Whether a net is to blame: the library's own errors, whichever library it uses for connections."""
    return type(error).__module__.startswith(("httpx", "httpcore"))


@contextmanager
def _alone(partial: Path) -> Iterator[Path | None]:
    """The file that is read into, which no other process has; None: another had it, and is done with it."""
    make_folder(partial.parent)
    with partial.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), partial.stat()):
                yield partial
                return
        yield None


def _checksum(path: Path, file: RepositoryFile) -> str:
    """Of the kind that the hub says of this file."""
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb", buffering=0) as content:
        return hashlib.file_digest(content, lambda: digest).hexdigest()


def _write_ref(wanted: RepositoryModel, commit: str) -> None:
    """What a revision is now, as the library would write it, which does not wait for the disk."""
    path = repository(wanted.repo) / "refs" / wanted.revision
    if wanted.revision != commit and read_ref(wanted) != commit:
        replace_file(path, commit.encode(), durable=True)


def _sync_names(wanted: RepositoryModel) -> None:
    """Have on the disk which files a repository has; what is in them is there already."""
    for folder, _, _ in os.walk(repository(wanted.repo)):
        sync_names(Path(folder))
    sync_names(cache_folder())


def _linked(api: HfApi, wanted: RepositoryModel, file: RepositoryFile) -> Path:
    """The file's path in the cache; what is not there yet is read."""
    return Path(
        api.hf_hub_download(wanted.repo, file.name, revision=wanted.revision, cache_dir=cache_folder())
    )


# --- what went wrong, in words


@contextmanager
def explained(wanted: RepositoryModel) -> Iterator[None]:
    """Errors of the library as sentences that say what to do."""
    from huggingface_hub import errors

    name, page = wanted.name, f"https://huggingface.co/{wanted.repo}"
    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError:
        raise UserError(
            f"{name}: its owners must grant access: request it at {page}, then set HF_TOKEN or run "
            "hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name}: the repository has no revision {printable(wanted.revision)}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{name}: there is no such repository, or it is private: see {page}; for a private one set "
            "HF_TOKEN or run hf auth login"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise not_here(wanted) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        why = "there were too many requests; wait a while" if status == 429 else "try again later"
        if status in (401, 403):
            why = "the token was not accepted: check HF_TOKEN, or run hf auth login"
        raise UserError(f"{name}: the hub answers with status {status}: {why}") from None
    except errors.HFValidationError as error:
        raise UserError(f"{name} is not a valid name on the hub: {printable(str(error))}") from None
    except OSError as error:
        raise UserError(f"{name}: {printable(str(error))}{_kept(wanted)}") from None
    except Exception as error:
        if not _is_of_connections(error):
            raise
        raise UserError(
            f"{name}: the hub cannot be reached ({printable(str(error) or type(error).__name__)})"
            f"{_kept(wanted) or '; try again later'}"
        ) from None


def _kept(wanted: RepositoryModel) -> str:
    """What to do where a part of a file has come."""
    begun = (path.stat().st_size for path in (repository(wanted.repo) / "blobs").glob("*.hetrun-incomplete"))
    return "; the part already downloaded is kept: pull it again to continue" if any(begun) else ""


def not_here(wanted: RepositoryModel) -> UserError:
    """A model is not on this machine, and may not be brought."""
    what = "is not complete here" if snapshot(wanted) else "is not here"
    return UserError(f"{wanted.name} {what}, and HF_HUB_OFFLINE or --offline forbids downloading it")
