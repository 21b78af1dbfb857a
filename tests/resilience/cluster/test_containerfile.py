"""The Containerfile, built by buildah on a Debian base that debootstrap makes, and a job in a container of the image.

An image registry is not needed: the base is Debian's own packages, and pip installs the dependencies. Torch comes from
a folder that PIP_FIND_LINKS names if that has a build for CPUs; the build from PyPI is gigabytes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megascale
from benchmarks.harness.launched import make

ROOT = Path(__file__).parents[3]
CERTIFICATES = "/etc/ssl/certs"
PACKAGES = "python3,python3-pip,python-is-python3,ca-certificates"
MISSING = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
# Behind a proxy with its own authority the build needs this machine's certificates.
BASE = f"FROM scratch\nADD base.tar /\nENV PIP_CERT={CERTIFICATES}/ca-certificates.crt\n"
WHEELS = [folder for folder in os.environ.get("PIP_FIND_LINKS", "").split() if Path(folder).is_dir()]
USER = 1000

Buildah = Callable[..., str]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Run buildah with storage of its own, and without user namespaces, which a container may lack.

    The storage of gigabytes is deleted at the end.
    """
    storage = tmp_path_factory.mktemp("storage")
    options = [f"--root={storage}/root", f"--runroot={storage}/run", "--storage-driver=vfs"]

    def run(*arguments: str) -> str:
        environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        result = subprocess.run(
            ["buildah"] + options + list(arguments), capture_output=True, text=True, env=environment
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout

    yield run
    run("rm", "--all")
    run("rmi", "--all", "--force")
    shutil.rmtree(storage)


@pytest.fixture(scope="module")
def image(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the image; return its name."""
    folder = tmp_path_factory.mktemp("base")
    root = folder / "root"
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
    result = subprocess.run(bootstrap, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip(f"debootstrap cannot make a base here: {(result.stdout + result.stderr)[-300:]}")
    subprocess.run(["tar", "-C", str(root), "-cf", str(folder / "base.tar"), "."], check=True)
    shutil.rmtree(root)
    (folder / "Containerfile").write_text(BASE)
    buildah("bud", "-f", str(folder / "Containerfile"), "-t", "localhost/base", str(folder))
    (folder / "base.tar").unlink()
    options = ["--break-system-packages"] + [f"--find-links={wheels}" for wheels in WHEELS]
    buildah(
        "bud",
        *[f"--volume={path}:{path}:ro" for path in [CERTIFICATES] + WHEELS],
        "--build-arg=BASE=localhost/base",
        f"--build-arg=PIP_OPTIONS={shlex.join(options)}",
        f"--file={ROOT}/deploy/kubernetes/Containerfile",
        "--tag=localhost/megascale",
        str(ROOT),
    )
    return "localhost/megascale"


@pytest.fixture(scope="module")
def container(buildah: Buildah, image: str) -> str:
    """Return the name of a container of the image."""
    return buildah("from", image).strip()


pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("MEGASCALE_TEST_KUBERNETES"), reason="builds for minutes: make test-kubernetes"
    ),
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not found: apt-get install buildah debootstrap"),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root"),
    pytest.mark.timeout(3600),
]


def test_image_has_the_package_a_compiler_and_a_user_without_rights(buildah, image, container, record_property):
    config = json.loads(buildah("inspect", "--type=image", image))["OCIv1"]["config"]
    assert config["User"] == str(USER)
    assert "HOME=/home/megascale" in config["Env"]
    code = "import megascale, os; print(megascale.__version__, os.getuid(), os.environ['HOME'], megascale.__file__)"
    fields = buildah("run", container, "--", "python3", "-P", "-c", code).split()
    assert fields[:3] == [megascale.__version__, str(USER), "/home/megascale"]
    assert "packages" in fields[3]  # it is installed, not imported from the build's folder
    assert buildah("run", container, "--", "sh", "-c", "command -v gcc megascale && id -un").split()[-1] == "megascale"
    root = buildah("mount", container).strip()
    size = subprocess.run(["du", "-sm", root], capture_output=True, text=True, check=True).stdout.split()[0]
    record_property("image_size_mib", size)


def test_a_job_trains_in_the_image(buildah, container, tmp_path):
    """Driver, agents and trainers run as the image's user and with its torch."""
    file = make(tmp_path)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, USER, USER)
    launch = ["megascale", "launch", str(file), "--train.name=image", "--train.steps=4"]
    buildah("run", f"--volume={tmp_path}:{tmp_path}", container, "--", *launch)
    lines = (tmp_path / "runs" / "image" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)][-1] == 4
