"""How much memory this machine's GPUs have."""

import shutil
import subprocess

_QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")


def memory_of_gpus() -> int | None:
    """Bytes of the smallest GPU; None without ``nvidia-smi``. It starts no CUDA context."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        said = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) for line in said.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
