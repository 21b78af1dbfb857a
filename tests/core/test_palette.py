"""One palette: the pages of the dashboard and pictures of the command line have the same colours."""

from __future__ import annotations

import re
from pathlib import Path

import megascale
from megascale.core import palette

PAGES = Path(megascale.__file__).parent / "observe" / "dashboard" / "pages"


def test_the_pages_have_the_colours_of_the_pictures():
    style = (PAGES / "dashboard.css").read_text()
    light = dict(re.findall(r"--([\w-]+): (#\w+)", style.split("}")[0]))
    assert light["forward"] == palette.FORWARD
    assert light["backward"] == palette.BACKWARD
    assert light["update"] == palette.OPTIMIZER
    assert light["other"] == palette.OTHER
    assert light["bubble"] == palette.BUBBLE
    assert light["exposed"] == palette.EXPOSED
    assert light["samples"] == palette.SAMPLES
    classes = dict(re.findall(r"\.m-(\w+) { background: var\(--(\w+)\); }", style))
    # The pages draw pipeline and graph buffers in stripes.
    classes["buffers"] = classes.pop("tensor_buffers")
    assert {kind: light[name] for kind, name in classes.items()} == palette.MEMORY
    runs = re.search(r"LIGHT = \[(.*?)\]", (PAGES / "colours.js").read_text())[1]
    assert tuple(re.findall(r"#\w+", runs)) == palette.RUNS


def test_chunks_go_from_dark_to_light():
    shades = palette.list_chunk_shades(palette.FORWARD)
    assert shades[1] == palette.FORWARD
    brightness = [sum(int(shade[at : at + 2], 16) for at in (1, 3, 5)) for shade in shades]
    assert brightness == sorted(set(brightness))
    assert (palette.mix("#000000", 1.0), palette.mix("#ffffff", -1.0)) == ("#ffffff", "#000000")
