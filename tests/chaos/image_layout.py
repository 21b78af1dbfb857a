"""The layout of the image of deploy/kubernetes/Containerfile, without its content: user, home, folders, environment.

Containers of the chaos runner have this layout, and the interpreter and packages of this machine are mounted into it.
So no image registry and no gigabytes of packages are needed for each node.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import megascale

CONTAINERFILE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "Containerfile"
# Mount points and the folders of every Linux image.
_FOLDERS = ("usr", "etc", "proc", "sys", "dev", "root", "tmp", "run", "var", "var/lib", "home")
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_HOST_FILES = ("etc/nsswitch.conf", "etc/ld.so.cache")
PROGRAMS = "opt/programs"  # folder of the image's python3, since /usr is this machine's


@dataclass(frozen=True)
class ImageLayout:
    """The layout of an image.

    Attributes:
        user: user and group id of its processes.
        home: home folder of the user.
        work_folder: folder in which its processes start.
        environment: variables of its processes.
        folders: paths below the root without a leading slash.
        links: path of a link -> its target.
        files: path of an executable file -> content.
        mounts: folders of this machine that are mounted read-only at the same path.
    """

    user: int
    home: str
    work_folder: str
    environment: dict[str, str]
    folders: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    mounts: list[str] = field(default_factory=list)


def read_image_layout() -> ImageLayout:
    """Return the layout that the Containerfile describes, with `python3` of this machine."""
    text = CONTAINERFILE.read_text()
    user, name = re.findall(r"^RUN useradd --uid (\d+) .*?(\w+)$", text, re.MULTILINE)[0]
    if re.findall(r"^USER (\d+)$", text, re.MULTILINE)[-1] != user:
        raise AssertionError(f"{CONTAINERFILE} makes user {user} and ends as another user")
    work_folder = re.findall(r"^WORKDIR (\S+)$", text, re.MULTILINE)[-1]
    environment = dict(re.findall(r"(\w+)=(\S+)", re.findall(r"^ENV (.+)$", text, re.MULTILINE)[-1]))
    environment["PATH"] = f"/{PROGRAMS}:/usr/local/bin:/usr/bin:/bin:/sbin"
    home = environment["HOME"]
    mounts = find_mounts()
    paths = mounts + [work_folder, home, f"/{PROGRAMS}"]
    parents = {str(folder).strip("/") for path in paths for folder in [Path(path), *Path(path).parents]}
    files = {path: Path("/", path).read_bytes() for path in _HOST_FILES if Path("/", path).exists()}
    files["etc/passwd"] = f"root:x:0:0:root:/root:/bin/sh\n{name}:x:{user}:{user}::{home}:/bin/sh\n".encode()
    files["etc/group"] = f"root:x:0:\n{name}:x:{user}:\n".encode()
    files[f"{PROGRAMS}/python3"] = f'#!/bin/sh\nexec {sys.executable} "$@"\n'.encode()
    return ImageLayout(
        user=int(user),
        home=home,
        work_folder=work_folder,
        environment=environment,
        folders=sorted({*_FOLDERS, *parents} - {""}),
        links=dict(_LINKS),
        files=files,
        mounts=mounts,
    )


def find_mounts() -> list[str]:
    """Return the folders of this machine that a container needs to run what is installed here."""
    packages = [path for path in sys.path if Path(path).name == "site-packages"]
    candidates = ["/usr", sys.prefix, sys.base_prefix, find_source()] + packages
    mounts: list[str] = []
    for path in sorted(dict.fromkeys(candidates), key=len):
        if not any(Path(path).is_relative_to(mount) for mount in mounts):
            mounts.append(path)
    return mounts


def find_source() -> str:
    """Return the folder from which the package megascale is imported."""
    return str(Path(megascale.__file__).resolve().parent.parent)


def write_image_folder(layout: ImageLayout, folder: Path) -> None:
    """Write the layout as a folder, which Apptainer calls a sandbox."""
    for path in layout.folders:
        (folder / path).mkdir(parents=True, exist_ok=True)
    for path, target in layout.links.items():
        (folder / path).symlink_to(target)
    for path, content in layout.files.items():
        (folder / path).write_bytes(content)
        (folder / path).chmod(0o755)
