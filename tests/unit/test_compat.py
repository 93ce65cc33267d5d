"""Which versions belong together, and what is said of others."""

import re
from pathlib import Path

import pytest

from rechpc.compat import RELEASES, Versions, warning

ROOT = Path(__file__).resolve().parents[2]


def found(torch, fbgemm, torchrec, rocm=None, *archs):
    return Versions(torch=torch, fbgemm=fbgemm, torchrec=torchrec, rocm=rocm, archs=archs)


@pytest.mark.parametrize(
    "good",
    [
        found("2.13.0+cpu", "1.8.0", "1.8.0"),
        found("2.14.0+rocm10.1.0", "2026.10.8", "1.9.2", "10.1.0", "gfx942", "gfx950"),
        found("2.10.0+rocm7.1", "1.5.0+rocm7.1.25424", "1.5.1", "7.1.25424", "gfx950"),
        found("2.11.0", None, "1.6.1"),
    ],
)
def test_what_was_released_together_is_not_warned_of(good):
    assert warning(good) is None


@pytest.mark.parametrize(
    ("odd", "problem", "nearest"),
    [
        (found("2.13.0", "1.8.0", "1.4.0"), "TorchRec 1.4.0 is not that of torch 2.13", "torch 2.13 with .* 1.8"),
        (found("2.13.0", "1.7.0", "1.8.0"), "FBGEMM 1.7.0 is not that of torch 2.13", "torch 2.13 with .* 1.8"),
        (found("2.14.0", "2026.10.8", "1.8.0", "10.1"), "TorchRec 1.8.0 is not that of torch 2.14", "torch 2.14"),
        (found("2.99.0", "1.8.0", "1.8.0"), "torch 2.99.0 is not in the table", "torch 2.14"),
        (found("2.9.0", "1.4.0", "1.4.0", "7.0.1"), "ROCm 7.0.1 is none", "torch 2.9 .* ROCm 6.3 or 6.4"),
        (found("2.9.0", "1.4.0", "1.4.0", "6.4", "gfx950"), "no code for gfx950", "torch 2.10 .*gfx950"),
        (found("2.9.0", "1.4.0", "1.4.0", None, "gfx1100"), "no code for gfx1100", "torch 2.9 "),
        (found(None, "1.8.0", "1.8.0"), "torch None is not in the table", "torch 2.5"),
    ],
)
def test_what_was_not_is_one_line_with_the_nearest_that_was(odd, problem, nearest):
    line = warning(odd)
    assert "\n" not in line
    assert problem in line
    assert re.search(f"nearest that belong together: {nearest}", line)


def test_the_versions_that_are_installed_here_belong_together():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "containers/pins.txt").read_text(), re.M))
    torchrec = re.search(r"^torchrec==(\S+)$", (ROOT / "containers/torchrec.txt").read_text(), re.M)[1]
    assert warning(found(pins["torch"], pins["fbgemm-gpu-cpu"], torchrec)) is None


def test_the_documentation_shows_the_table_as_it_is():
    text = (ROOT / "docs/container.md").read_text()
    rows = [f"| {r.torch} | {r.fbgemm} | {' '.join(r.rocm)} | {' '.join(r.archs)} |" for r in RELEASES]
    assert [row for row in rows if row.replace("|  |", "| |").replace("|  |", "| |") not in text] == []
