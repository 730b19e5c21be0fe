"""What each benchmark imports before MindSpore, to find the examples' modules and to have fast convolutions."""

import json
import os
import subprocess
import sys
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this when it is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))


def measured_by(script, *arguments, **variables):
    """Runs a script with environment variables. Returns its last line, parsed as JSON, and all of its output."""
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, **variables}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1]), result.stdout + result.stderr
