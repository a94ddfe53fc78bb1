"""Kill one experiment at random moments, again and again, and compare its manifests with an undisturbed run's.

    python benchmarks/soak.py /tmp/undisturbed /tmp/soaked --kills 30

The first folder holds an undisturbed run (made if it is not there), the second the one that is killed. Each kill is a
SIGKILL by pid, of a stage or of Snakemake itself, at a random moment; then `--unlock` and the same command again. When
everything is done before the last kill, the results of one seed are taken away. Prints a line per kill (time, victim,
pid, stage, what it made) and a verdict; ends with 1 if a manifest differs or a run fails by itself.

A smaller one: --override '{experiments: {quickstart: {seeds: [0]}}, models: {tiny: {pretraining_steps: 20}}}'
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import psutil
import typer

REPOSITORY = Path(__file__).resolve().parents[1]
SNAKEMAKE = [str(Path(sys.executable).parent / "snakemake"), "-s", str(REPOSITORY / "Snakefile")]
#: The package beside this file, whichever is installed.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


@dataclass
class Workflow:
    """One experiment in a folder of its own."""

    folder: Path
    experiment: str
    arguments: list[str]

    @property
    def log(self) -> Path:
        """What the last run of Snakemake said."""
        return self.folder / "snakemake.log"

    @property
    def results(self) -> Path:
        return self.folder / "results" / self.experiment

    def start(self, *options: str) -> subprocess.Popen:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [*self.arguments, *options]
        with open(self.log, "w") as log:
            return subprocess.Popen(command, cwd=self.folder, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)

    def finish(self, *options: str) -> None:
        self.must_have_ended_well(self.start(*options).wait())

    def must_have_ended_well(self, code: int) -> None:
        if code != 0:
            sys.exit(f"{self.log.read_text()[-5000:]}\nFAILED: a run that nobody killed ended with {code}")

    def manifests(self) -> dict[str, str]:
        found = self.folder.glob("results/**/*.manifest.json")
        return {str(path.relative_to(self.folder)): path.read_text() for path in found}


def main(
    undisturbed: Path,
    soaked: Path,
    kills: int = 30,
    longest_wait: Annotated[float, typer.Option(help="most seconds from a start to its kill")] = 60.0,
    seed: Annotated[int, typer.Option(help="of moments and victims")] = 0,
    experiment: str = "quickstart",
    override: Annotated[str, typer.Option(help="values laid over the files, as for snakemake --config override=")] = "",
    cores: int = 2,
) -> None:
    """Run the soak; the log of kills goes to standard output."""
    given = [f"experiments={experiment}", *([f"override={override}"] if override else [])]
    arguments = [*SNAKEMAKE, "--cores", str(cores), "--config", *given]
    expected, workflow = (Workflow(folder, experiment, arguments) for folder in (undisturbed, soaked))
    generator = random.Random(seed)
    expected.finish()
    say(f"undisturbed: {len(expected.manifests())} artifacts in {undisturbed}")
    runs = soak(workflow, expected, kills, longest_wait, generator)
    workflow.finish()
    compare(expected, workflow)
    say(f"PASSED: {kills} kills in {runs} runs, and all {len(expected.manifests())} manifests equal the undisturbed")


def soak(workflow: Workflow, expected: Workflow, kills: int, longest_wait: float, generator: random.Random) -> int:
    """Start, kill, unlock and start again until there were so many kills; returns how many runs that took."""
    done = runs = 0
    while done < kills:
        running = workflow.start()
        runs += 1
        with suppress(subprocess.TimeoutExpired):
            workflow.must_have_ended_well(running.wait(timeout=generator.uniform(1.0, longest_wait)))
            compare(expected, workflow)
            say(f"done after {done} kills, and equal; took away {take_one_seed_away(workflow, generator)}")
            continue
        if killed := kill_one(running, generator):
            done += 1
            say(f"kill {done:>2}: {killed}")
        running.wait()
        if killed:
            workflow.finish("--unlock")
    return runs


def kill_one(running: subprocess.Popen, generator: random.Random) -> str | None:
    """SIGKILL a stage or Snakemake, whose stages are orphans then; None if there was nothing left to kill.

    Of a stage's death Snakemake hears: it lets the other stage end and gives up. Of its own it does not.
    """
    with suppress(psutil.NoSuchProcess):
        snakemake = psutil.Process(running.pid)
        stages = {process: stage for process in snakemake.children(recursive=True) if (stage := stage_of(process))}
        victim = generator.choice([snakemake, *stages])
        victim.send_signal(signal.SIGKILL)
        at_work = ", ".join(stages.values()) or "no stage"
        name = f"stage      pid {victim.pid}: {stages[victim]}" if victim in stages else None
        return name or f"snakemake  pid {victim.pid}, with {at_work} at work"
    return None


def stage_of(process: psutil.Process) -> str | None:
    """The stage that a process runs and the first thing that it makes, or None for any other process."""
    with suppress(psutil.Error):
        command = process.cmdline()
        if len(command) > 2 and command[1].endswith("/comlrl-stages"):
            made = [part for part in command[3:] if part.startswith("results/")]
            options = dict(pairwise(command))
            option = next((options[name] for name in ("--output", "--train") if name in options), None)
            return f"{command[2]} {option or ' '.join(made[:1])}"
    return None


def take_one_seed_away(workflow: Workflow, generator: random.Random) -> Path:
    """Delete the results of one seed, so that there is work to kill again."""
    seed = generator.choice(sorted(workflow.results.glob("seed*")))
    shutil.rmtree(seed)
    return seed


def compare(expected: Workflow, workflow: Workflow) -> None:
    """End with 1 if a manifest differs, is missing or is too many."""
    one, other = expected.manifests(), workflow.manifests()
    different = sorted(name for name in {**one, **other} if one.get(name) != other.get(name))
    if different:
        sys.exit("\n".join(different) + f"\nFAILED: {len(different)} manifests differ from the undisturbed run's")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    typer.run(main)
