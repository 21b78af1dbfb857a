"""The Containerfile, built by buildah on a Debian base that debootstrap makes, and a container of the image.

An image registry is not needed: the base is Debian's own packages. The image is built without dependencies, which are
gigabytes; what remains are its steps, its user, its folders and the installed package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import megascale

ROOT = Path(__file__).parents[3]
CERTIFICATES = "/etc/ssl/certs"
PACKAGES = "python3,python3-pip,python-is-python3,ca-certificates"
MISSING = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
# Behind a proxy with its own authority the build needs this machine's certificates.
BASE = f"FROM scratch\nADD base.tar /\nENV PIP_CERT={CERTIFICATES}/ca-certificates.crt\n"

Buildah = Callable[..., str]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Buildah:
    """Run buildah with storage of its own, and without user namespaces, which a container may lack."""
    storage = tmp_path_factory.mktemp("storage")
    options = [f"--root={storage}/root", f"--runroot={storage}/run", "--storage-driver=vfs"]

    def run(*arguments: str) -> str:
        environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        result = subprocess.run(
            ["buildah"] + options + list(arguments), capture_output=True, text=True, env=environment
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout

    return run


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
    (folder / "Containerfile").write_text(BASE)
    buildah("bud", "-f", str(folder / "Containerfile"), "-t", "localhost/base", str(folder))
    buildah(
        "bud",
        f"--volume={CERTIFICATES}:{CERTIFICATES}:ro",
        "--build-arg=BASE=localhost/base",
        "--build-arg=PIP_OPTIONS=--no-deps --break-system-packages",
        f"--file={ROOT}/deploy/kubernetes/Containerfile",
        "--tag=localhost/megascale",
        str(ROOT),
    )
    return "localhost/megascale"


@pytest.mark.skipif(not os.environ.get("MEGASCALE_TEST_KUBERNETES"), reason="builds for minutes: make test-kubernetes")
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not found: apt-get install buildah debootstrap")
@pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root")
def test_image_has_the_package_a_compiler_and_a_user_without_rights(buildah, image):
    config = json.loads(buildah("inspect", "--type=image", image))["OCIv1"]["config"]
    assert config["User"] == "1000"
    assert "HOME=/home/megascale" in config["Env"]
    container = buildah("from", image).strip()
    code = "import megascale, os; print(megascale.__version__, os.getuid(), os.environ['HOME'], megascale.__file__)"
    fields = buildah("run", container, "--", "python3", "-P", "-c", code).split()
    assert fields[:3] == [megascale.__version__, "1000", "/home/megascale"]
    assert "packages" in fields[3]  # it is installed, not imported from the build's folder
    assert buildah("run", container, "--", "sh", "-c", "command -v gcc megascale && id -un").split()[-1] == "megascale"
