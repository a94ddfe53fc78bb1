"""Checking results, and keeping them after a refactor.

Both work on the manifests and provenance beside the artifacts, and compare them with what the present configuration
and code would make.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from comlrl_stages.artifacts import mismatches, read_manifest
from comlrl_stages.condition import Difference, Results, read_provenance
from comlrl_stages.errors import UserError
from comlrl_stages.files import beside, write_json
from comlrl_stages.jobs import Job
from comlrl_stages.progress import progress_reporter

# --- verify -------------------------------------------------------------------------------------------------------

SECONDS_BETWEEN_LINES = 10.0
#: Lines that are told of one artifact.
SHOWN = 5
#: What an artifact can be found to be; the first two are well.
FINE, UNCLAIMED, DIFFERENT, BROKEN = "fine", "unclaimed", "different", "broken"
GONE = "gone, its manifest is not"


@dataclass
class Finding:
    """One artifact, checked."""

    artifact: str
    stage: str
    state: str = FINE
    problems: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    inputs_not_here: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """What to tell; nothing of an artifact that is fine."""
        if self.state != FINE:
            yield f"{self.artifact}: {_MEANS[self.state]}"
        told = [*self.problems, *map(str, self.differences)]
        yield from (f"  {text}" for text in told[:SHOWN])
        if len(told) > SHOWN:
            yield f"  and {len(told) - SHOWN} more (--json lists all)"


_MEANS = {
    UNCLAIMED: "nothing in the present configuration asks for it",
    DIFFERENT: "is not what the present configuration and code would make",
    BROKEN: "is damaged",
}


def verify(results: Results, folder: str) -> list[Finding]:
    """Check every artifact in a folder: its files against the manifest, its provenance against the present.

    Raises UserError for a folder without artifacts.
    """
    paths = sorted(_artifacts_in(results.root, folder))
    if not paths:
        raise UserError(f"{results.root / folder}: holds no artifact (nothing with a .manifest.json beside it)")
    advance = progress_reporter(len(paths), "verify: artifacts", SECONDS_BETWEEN_LINES)
    findings = []
    for path in paths:
        findings.append(_checked(results, path))
        advance()
    return findings


def _artifacts_in(root: Path, folder: str) -> Iterator[str]:
    """Finished artifacts in a folder, or the folder itself if it is one."""
    suffix = ".manifest.json"
    if (root / f"{folder}{suffix}").exists():
        yield folder
    for place, folders, names in os.walk(root / folder):  # unlike rglob, it bears folders that go while a stage works
        folders[:] = [name for name in folders if not name.endswith(".partial")]
        for name in names:
            if name.endswith(suffix):
                yield (Path(place) / name).relative_to(root).as_posix().removesuffix(suffix)


def _checked(results: Results, path: str) -> Finding:
    job = results.makers.get(path)
    finding = Finding(path, job.stage if job else "")
    try:
        finding.problems += _damage(results.root, path)
        if job is not None:
            finding.differences = results.differences(path)
            finding.inputs_not_here = results.inputs_not_here(job)
    except UserError as error:
        finding.problems.append(str(error))
    if finding.problems:
        finding.state = BROKEN
    elif finding.differences:
        finding.state = DIFFERENT
    elif job is None:
        finding.state = UNCLAIMED
    return finding


def _damage(root: Path, path: str) -> list[str]:
    """What of an artifact is not as its manifest says, by paths below the project's folder."""
    manifest = read_manifest(root / path)
    if not (root / path).exists():
        return [GONE]
    return [problem.removeprefix(f"{root}/") for problem in mismatches(root / path, manifest)]


def is_well(findings: Sequence[Finding]) -> bool:
    """Whether every artifact is whole and none differs from what would be made now."""
    return not any(finding.state in (DIFFERENT, BROKEN) for finding in findings)


def verification_text(findings: Sequence[Finding]) -> Iterator[str]:
    """A paragraph per artifact that is not fine, and a summary line."""
    for finding in findings:
        yield from finding.lines()
    lost = sorted({path for finding in findings for path in finding.inputs_not_here})
    yield from (f"{path}: is not here, so what was made from it was not compared with it" for path in lost)
    counts = Counter(finding.state for finding in findings)
    told = [f"{counts[state]} {state}" for state in (FINE, UNCLAIMED, DIFFERENT, BROKEN) if counts[state]]
    yield f"{len(findings)} artifact{'s' * (len(findings) > 1)}: {', '.join(told)}"


def verification_json(findings: Sequence[Finding]) -> str:
    """The findings for programs."""
    counts = Counter(finding.state for finding in findings)
    content = {"well": is_well(findings), "counts": counts, "artifacts": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=1, ensure_ascii=False)


# --- accept -------------------------------------------------------------------------------------------------------


@dataclass
class Acceptance:
    """Results that were made by other code or libraries, to be kept as if the present ones had made them."""

    results: Results
    jobs: list[Job]  # all of the folder that were done, and those that they were made from
    differences: dict[str, list[Difference]]

    def lines(self) -> Iterator[str]:
        """What differs, a line per artifact and difference."""
        for path, differences in self.differences.items():
            yield from (f"{path}: {one}" for one in differences)


def acceptance_of(results: Results, folder: str) -> Acceptance:
    """Find what would be accepted. Raises UserError where more differs than code and library versions.

    What the folder's artifacts were made from counts with them: Snakemake would run that again, too.
    """
    jobs = _with_upstream(results, folder)
    if not jobs:
        raise UserError(f"{results.root / folder}: holds no artifact that the present configuration asks for")
    refused, accepted = [], {}
    for path in (path for job in jobs for path in job.outputs):
        finding = _checked(results, path)
        refused += [f"{path}: {text}" for text in finding.problems if text != GONE]
        refused += [f"{path}: {one}" for one in finding.differences if not one.is_of_code]
        if finding.differences:
            accepted[path] = finding.differences
    if refused:
        raise UserError(
            "only a difference of code or library versions can be accepted; these results come from other settings or "
            "inputs, or are damaged, and must be made again (or accept a folder without them):\n" + "\n".join(refused)
        )
    return Acceptance(results, jobs, accepted)


def _with_upstream(results: Results, folder: str) -> list[Job]:
    """The jobs whose artifacts lie in a folder and those that they depend on, as far as they have been done.

    A folder that was deleted to save space counts while its manifest is there: Snakemake counts it, too.
    """
    wanted = {path for path in results.makers if path == folder or path.startswith(f"{folder}/")}
    for job in reversed(results.jobs):
        if wanted & set(job.outputs):
            wanted |= set(job.input_paths())
    wanted_jobs = [job for job in results.jobs if wanted & set(job.outputs)]
    return [job for job in wanted_jobs if all(beside(results.root / path, "manifest").exists() for path in job.outputs)]


def accept(acceptance: Acceptance, configfiles: Sequence[Path], snakefile: Path | None) -> None:
    """Let Snakemake record the present code and versions for the results, then let their provenance say so.

    The provenance keeps what it said before. Raises UserError where Snakemake refuses, with nothing recorded.
    """
    if acceptance.results.root != Path.cwd():
        raise UserError(f"Snakemake has its records in the project's folder; run this in {acceptance.results.root}")
    _touch(acceptance, configfiles, snakefile)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for path, differences in acceptance.differences.items():
        provenance = read_provenance(Path(path))
        changed = {one.key: {"recorded": one.recorded, "accepted": one.present} for one in differences}
        history = [*provenance.get("accepted_from", []), {"at": now, "differences": changed}]
        tracked = acceptance.results.tracked(acceptance.results.makers[path])
        write_json(beside(Path(path), "provenance"), {**provenance, "tracked": tracked, "accepted_from": history})


def _touch(acceptance: Acceptance, configfiles: Sequence[Path], snakefile: Path | None) -> None:
    """`snakemake --touch` records the present parameters of jobs without running them."""
    experiments = json.dumps(list(acceptance.results.project.experiments))
    command = [sys.executable, "-m", "snakemake", *(["-s", str(snakefile)] if snakefile else [])]
    command += ["--touch", *(str(beside(Path(job.outputs[0]), "manifest")) for job in acceptance.jobs)]
    command += ["--cores", "1", "--configfile", *map(str, configfiles), "--config", f"experiments={experiments}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"snakemake --touch failed, so nothing was accepted:\n{done.stdout.strip()[-3000:]}")
