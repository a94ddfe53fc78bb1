"""Kill one quickstart at random moments, again and again, and compare its manifests with an undisturbed run's.

    python benchmarks/soak.py /tmp/undisturbed /tmp/soaked --kills 30

The first folder holds an undisturbed run (made if it is empty), the second the one that is killed. Each kill is a
SIGKILL by pid, of a stage or of Snakemake itself, at a random moment; then `--unlock` and the same command again.
Prints a line per kill and ends with 1 if any manifest differs.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

REPOSITORY = Path(__file__).resolve().parents[1]
SNAKEMAKE = [str(Path(sys.executable).parent / "snakemake"), "-s", str(REPOSITORY / "Snakefile"), "--cores", "2"]


def main(
    undisturbed: Path,
    soaked: Path,
    kills: int = 30,
    longest_wait: Annotated[float, typer.Option(help="most seconds between two kills")] = 20.0,
    seed: int = 0,
) -> None:
    """Run the soak; the log of kills goes to standard output."""
    generator = random.Random(seed)
    for folder in (undisturbed, soaked):
        folder.mkdir(parents=True, exist_ok=True)
    if not (undisturbed / "results/quickstart/report.manifest.json").exists():
        subprocess.run(SNAKEMAKE, cwd=undisturbed, check=True, capture_output=True)
    done, attempt = 0, 0
    while done < kills:
        attempt += 1
        running = subprocess.Popen(SNAKEMAKE, cwd=soaked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            running.wait(timeout=generator.uniform(1.0, longest_wait))
            if running.returncode == 0:
                print(f"the run ended by itself after {done} kills; its results are taken away to go on", flush=True)
                _compare(undisturbed, soaked)
                _take_away_a_training(soaked, generator)
        except subprocess.TimeoutExpired:
            done += 1
            print(f"kill {done}: {_kill(running, generator)}", flush=True)
        running.wait()
        subprocess.run([*SNAKEMAKE, "--unlock"], cwd=soaked, capture_output=True, check=True)
    last = subprocess.run(SNAKEMAKE, cwd=soaked, capture_output=True, text=True, check=False)
    if last.returncode != 0:
        sys.exit(f"the last run failed:\n{last.stdout}{last.stderr}")
    _compare(undisturbed, soaked)
    print(f"{done} kills in {attempt} runs; every manifest equals the undisturbed run's")


def _kill(running: subprocess.Popen, generator: random.Random) -> str:
    """SIGKILL a random stage, or Snakemake, whose stages are then orphans for a moment."""
    snakemake = psutil.Process(running.pid)
    stages = [p for p in snakemake.children(recursive=True) if "comlrl-stages" in " ".join(p.cmdline()[:2])]
    victim = generator.choice([snakemake, *stages])
    name = "snakemake" if victim is snakemake else " ".join(victim.cmdline()[2:3])
    os.kill(victim.pid, signal.SIGKILL)
    if victim is not snakemake:
        time.sleep(generator.uniform(0, 2))
        if running.poll() is None:
            running.terminate()
    return f"{name} (pid {victim.pid})"


def _take_away_a_training(soaked: Path, generator: random.Random) -> None:
    """Delete the results of one seed, so that there is work to kill again."""
    seed = generator.choice(sorted((soaked / "results/quickstart").glob("seed*")))
    subprocess.run(["rm", "-rf", str(seed)], check=True)
    for path in (soaked / "results/quickstart").glob("report*"):
        subprocess.run(["rm", "-rf", str(path)], check=True)


def _compare(undisturbed: Path, soaked: Path) -> None:
    manifests = [
        {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("results/**/*.manifest.json")}
        for folder in (undisturbed, soaked)
    ]
    different = sorted(
        name for name in {**manifests[0], **manifests[1]} if manifests[0].get(name) != manifests[1].get(name)
    )
    # The report draws the times of the stages, so its figures differ from run to run.
    different = [name for name in different if name != "results/quickstart/report.manifest.json"]
    if different:
        sys.exit("manifests differ:\n" + "\n".join(different))


if __name__ == "__main__":
    typer.run(main)
