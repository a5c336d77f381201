"""Search for new inputs of a fuzz target, guided by the code that they reach.

    pip install atheris
    python -m tests.fuzz.run nats --minutes 15

Inputs that reach new code are kept in a folder, and the smallest set of them is then copied to the
corpus of the target. An input that fails is written to the current directory; put it into the
corpus once the fault is fixed.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
_INPUT_BYTES_MAX = 600


def fuzz(target: str, arguments: list[str]) -> None:
    """Run libFuzzer on a target in this process. Does not return.

    Args:
        target: Name of the target.
        arguments: Path of the program, and arguments of libFuzzer.
    """
    import atheris

    with atheris.instrument_imports(include=["simplebus"]):
        from tests.fuzz.targets import TARGETS

    atheris.Setup(arguments, TARGETS[target])
    atheris.Fuzz()


def main() -> None:
    """Fuzz a target for some minutes, and add the inputs that it needs to its corpus."""
    from tests.fuzz.seeds import build_seeds
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=main.__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=15.0, metavar="MINUTES")
    options = parser.parse_args()
    corpus = CORPUS / options.target
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="simplebus-fuzz-") as directory:
        found, minimal = Path(directory, "found"), Path(directory, "minimal")
        found.mkdir()
        minimal.mkdir()
        program = Path(directory, "fuzz")  # libFuzzer starts it again to select inputs.
        program.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            f"from tests.fuzz.run import fuzz\nfuzz({options.target!r}, sys.argv)\n"
        )
        program.chmod(0o755)
        for number, seed in enumerate(build_seeds(options.target)):
            (found / f"seed-{number}").write_bytes(seed)
        _run(
            program,
            *(str(found), str(corpus)),
            f"-max_total_time={options.minutes * 60:.0f}",
            f"-max_len={_INPUT_BYTES_MAX}",
            "-timeout=20",
        )
        _run(program, "-merge=1", str(minimal), str(corpus), str(found))
        for path in minimal.iterdir():
            data = path.read_bytes()
            (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    print(f"{corpus} has {len(list(corpus.iterdir()))} inputs")


def _run(*command: str | Path) -> None:
    """Run a command. Exits with its status if it fails."""
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
