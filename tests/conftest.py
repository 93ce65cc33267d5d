"""Without torch, what needs it is left out, and said so."""

import importlib.util

_NEED_TORCH = ["distributed", "gpu", "local", "unit/test_data.py", "unit/test_metrics.py", "unit/test_schedule.py"]
_HAS_TORCH = importlib.util.find_spec("torchrec") is not None

collect_ignore = [] if _HAS_TORCH else _NEED_TORCH


def pytest_report_header() -> str:
    return "torch: yes" if _HAS_TORCH else f"torch: NO, so these are left out: {', '.join(_NEED_TORCH)}"
