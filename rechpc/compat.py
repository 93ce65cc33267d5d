"""Which versions of ROCm, torch, FBGEMM and TorchRec belong together, and for which GPUs; docs/container.md shows it.

Sources: FBGEMM's table of releases (docs/src/general/Releases.rst, 2026-08) and its `_fbgemm_torch_compat_table` (pull
requests 5941 and 6254); TorchRec has the numbers of FBGEMM (pull request 3877). Pure; must not know torch.
"""

import re
from dataclasses import dataclass

_OLD, _NEW = ("gfx908", "gfx90a", "gfx942"), ("gfx908", "gfx90a", "gfx942", "gfx950")


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """One release of the three that were made for each other; FBGEMM and TorchRec share its number."""

    torch: str
    fbgemm: str  # and TorchRec
    rocm: tuple[str, ...]  # for which FBGEMM's wheels are built; empty: not documented
    archs: tuple[str, ...]

    def words(self) -> str:
        """The release in one phrase."""
        rocm = f", ROCm {' or '.join(self.rocm)}" if self.rocm else ""
        archs = f", {' '.join(self.archs)}" if self.archs else ""
        return f"torch {self.torch} with FBGEMM and TorchRec {self.fbgemm}{rocm}{archs}"


RELEASES = (
    Release(torch="2.14", fbgemm="1.9", rocm=(), archs=()),
    Release(torch="2.13", fbgemm="1.8", rocm=(), archs=()),
    Release(torch="2.12", fbgemm="1.7", rocm=(), archs=()),
    Release(torch="2.11", fbgemm="1.6", rocm=("7.0", "7.1"), archs=_NEW),
    Release(torch="2.10", fbgemm="1.5", rocm=("7.0", "7.1"), archs=_NEW),
    Release(torch="2.9", fbgemm="1.4", rocm=("6.3", "6.4"), archs=_OLD),
    Release(torch="2.8", fbgemm="1.3", rocm=("6.3", "6.4"), archs=_OLD),
    Release(torch="2.7", fbgemm="1.2", rocm=("6.2", "6.3"), archs=_OLD),
    Release(torch="2.6", fbgemm="1.1", rocm=("6.1", "6.2", "6.3"), archs=_OLD),
    Release(torch="2.5", fbgemm="1.0", rocm=("6.0", "6.1"), archs=("gfx908", "gfx90a")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """What is in use, as the packages call themselves; None where it is not there or does not say."""

    torch: str | None
    fbgemm: str | None
    torchrec: str | None
    rocm: str | None = None  # None: a CPU or another vendor's GPU
    archs: tuple[str, ...] = ()  # for which it must hold code


def warning(found: Versions) -> str | None:
    """One line on a combination that nobody has released together, with the nearest that somebody has."""
    torch, fbgemm, torchrec = (_minor(v) for v in (found.torch, found.fbgemm, found.torchrec))
    release = next((r for r in RELEASES if r.torch == torch), None)
    problems = []
    if release is None:
        problems.append(f"torch {found.torch} is not in the table")
    else:
        # AMD builds FBGEMM from a commit, and calls it by its date; that says nothing against it.
        for name, minor, version in (("FBGEMM", fbgemm, found.fbgemm), ("TorchRec", torchrec, found.torchrec)):
            if version and minor != release.fbgemm and not re.match(r"20\d\d\.", version):
                problems.append(f"{name} {version} is not that of torch {torch}")
        built = not (found.fbgemm and re.match(r"20\d\d\.", found.fbgemm))
        if found.rocm and release.rocm and built and _minor(found.rocm) not in release.rocm:
            problems.append(f"ROCm {found.rocm} is none of FBGEMM's wheels")
        missing = [arch for arch in found.archs if release.archs and arch not in release.archs and built]
        if missing:
            problems.append(f"FBGEMM's wheels hold no code for {' '.join(missing)}")
    if not problems:
        return None
    return f"versions: {'; '.join(problems)}; nearest that belong together: {_nearest(found).words()}"


def _nearest(found: Versions) -> Release:
    """The release for these GPUs whose torch is closest, the newer of two; any where none names the GPUs."""
    fits = [r for r in RELEASES if set(found.archs) <= set(r.archs)] if found.archs else list(RELEASES)
    wanted = _number(found.torch)
    return min(fits or RELEASES, key=lambda r: (abs(_number(r.torch) - wanted), -_number(r.torch)))


def _minor(version: str | None) -> str | None:
    """The first two numbers of a version."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return f"{match[1]}.{match[2]}" if match else None


def _number(version: str | None) -> int:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return 1000 * int(match[1]) + int(match[2]) if match else 0
