"""Looking after results: damage and change are found and named, refactors kept, leftovers deleted, nothing else."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from comlrl_stages.artifacts import open_work
from comlrl_stages.cli import app
from comlrl_stages.condition import results_of
from comlrl_stages.errors import UserError
from comlrl_stages.files import beside, write_json
from comlrl_stages.pruning import asking, prune
from comlrl_stages.status import conditions, status_text
from comlrl_stages.upkeep import acceptance_of, is_well, verification_text, verify

EXPERIMENT = {
    "task": "length_ratio",
    "team": ["tiny", "other"],
    "collections": {"default": {}, "second": {}},
    "preferences": {"default": {"pairs_per_task": 3}},
    "methods": {"base": {}, "madpo": {}, "marlhf": {}},
}
SEED = "results/mine/seed0"
POLICY = f"{SEED}/methods/madpo/round001/policy"
KEPT_POLICY = f"{SEED}/methods/marlhf/round001/policy"
PAIRS = f"{SEED}/preferences/default/pairs.parquet"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A project folder with every artifact of an experiment, made by jobs that write a line instead of a model."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("tiny", "other"):
            write(f"config/models/{name}.yaml", "builtin: tiny\n")
        write("config/config.yaml", "experiments: [mine]\n")
        configure()
        for job in present().jobs:
            do(job)
    return folder


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    """A copy of that project, and the working directory in it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, text):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def configure(name="mine", **sections):
    """Write the experiment with some sections laid over."""
    values = deepcopy(EXPERIMENT)
    for section, change in sections.items():
        old = values.get(section)
        values[section] = {**old, **change} if isinstance(old, dict) and isinstance(change, dict) else change
    write(f"config/experiments/{name}.yaml", yaml.safe_dump(values))


def beside_configuration(folder="results"):
    """The results in a folder beside the present configuration, and the folder's path in the project."""
    config = yaml.safe_load(Path("config/config.yaml").read_text())
    return results_of(config, [Path("config")], "config/config.yaml", Path(folder))


def present():
    return beside_configuration()[0]


def opened(job, **changed):
    """The work of a job, as its stage opens it."""
    inputs = {
        name: [Path(p) for p in given] if isinstance(given, list) else Path(given) for name, given in job.inputs.items()
    }
    tracked = {**present().tracked(job), **changed}
    return open_work(job.stage, tracked, inputs, {Path(path).name: Path(path) for path in job.outputs})


def do(job, content="made"):
    """Make a job's artifacts: folders where the stage makes folders."""
    with opened(job) as work:
        for path in map(Path, job.outputs):
            place = work.output(path.name)
            inside = "report.html" if job.stage == "report" else "agent_0/weights"
            place = place if path.suffix else place / inside
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{content} {path}")


class Stop(Exception):
    pass


def begin(job, *files, **changed):
    """Leave work in progress behind, as a killed stage does."""
    with pytest.raises(Stop), opened(job, **changed) as work:
        for name in files:
            write(work.partial / name, "12345")
        raise Stop
    return Path(job.partial)


def job_of(path):
    return present().makers[path]


def remove(path):
    """Delete an artifact with what says that it is done."""
    shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()
    beside(Path(path), "manifest").unlink()


def found(folder="results"):
    """What `verify` finds: problems and differences of the artifacts that are not fine."""
    return {one.artifact: [*one.problems, *map(str, one.differences)] for one in checked(folder) if one.state != "fine"}


def checked(folder="results"):
    return verify(*beside_configuration(folder))


def states():
    """Where each job stands, by its title."""
    return {one.job.title: one for one in conditions(present())}


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# --- verify -------------------------------------------------------------------------------------------------------


def test_what_the_present_configuration_made_is_fine(project):
    assert found() == {} and is_well(checked())
    done = run("verify", "results/mine")
    artifacts = len([path for path in present().makers if "/mine/" in path])
    assert done.exit_code == 0 and done.stdout.splitlines() == [f"{artifacts} artifacts: {artifacts} fine"]


def test_a_flipped_byte_is_damage(project):
    write(f"{POLICY}/agent_0/weights", "other")
    assert list(found()) == [POLICY]
    assert found()[POLICY] == [
        f"{POLICY}/agent_0/weights: has changed since it was written (its SHA-256 is not the manifest's)"
    ]
    assert run("verify", "results").exit_code == 1


def test_a_folder_that_is_gone_is_one_line(project):
    shutil.rmtree(POLICY)
    assert found() == {POLICY: ["gone, its manifest is not"]}


@pytest.mark.parametrize("text", [None, "", "{}", '{"tracked": 1}'])
def test_an_artifact_whose_provenance_is_lost_or_damaged_is_not_fine(project, text):
    path = beside(Path(PAIRS), "provenance")
    path.unlink() if text is None else path.write_text(text)
    (problem,) = found()[PAIRS]
    assert problem.startswith(f"{project / PAIRS}.provenance.json: cannot be read")


def test_a_changed_setting_is_named_with_both_values(project):
    configure(preferences={"default": {"pairs_per_task": 2}})
    assert found() == {PAIRS: ["pair.pairs_per_task: 3 -> 2"]}
    assert run("verify").exit_code == 1


def test_a_long_setting_is_shown_around_its_first_change(project):
    configure(description="x" * 100)
    (told,) = found()[f"{SEED}/methods/madpo/card.md"]
    assert told.startswith('card.description: "" -> ') and len(told) < 150


def test_another_version_or_code_is_named(project):
    edit_provenance(PAIRS, **{"code": "0123456789abcdef", "versions.torch": "1.0"})
    present_code = present().tracked(job_of(PAIRS))["code"]
    assert found() == {PAIRS: [f"code: 0123456789abcdef -> {present_code}", "versions.torch: 1.0 -> (none)"]}


def edit_provenance(path, **tracked):
    file = beside(Path(path), "provenance")
    provenance = json.loads(file.read_text())
    write_json(file, {**provenance, "tracked": {**provenance["tracked"], **tracked}})


def test_an_input_that_was_made_anew_with_other_content_is_named(project):
    do(job_of(PAIRS), "other")
    told = found()
    assert f"{SEED}/methods/madpo/round001/policy" in told and f"{SEED}/reward_models/default" in told
    assert all(text.startswith(f"input pairs {PAIRS}: ") for text in told[POLICY])
    assert not any("collections" in path for path in told)


def test_an_input_that_was_made_anew_with_the_same_content_changes_nothing(project):
    do(job_of(PAIRS))
    assert found() == {}


def test_another_collection_is_another_input(project):
    configure(preferences={"default": {"pairs_per_task": 3, "collection": "second"}})
    both = "{0}/collections/default/{1}.parquet -> {0}/collections/second/{1}.parquet"
    assert found()[PAIRS] == [f"input {name}: {both.format(SEED, name)}" for name in ("rewards", "completions")]


def test_models_that_changed_places_are_noticed(project):
    configure(team=["other", "tiny"])
    swapped = "input models: results/models/tiny, results/models/other -> results/models/other, results/models/tiny"
    setting = 'sample.team.models: ["tiny", "other"] -> ["other", "tiny"]'
    assert found()[f"{SEED}/collections/default/completions.parquet"] == [setting, swapped]


def test_what_the_configuration_no_longer_asks_for_is_told_and_well(project):
    write("config/experiments/mine.yaml", yaml.safe_dump({**EXPERIMENT, "methods": {"base": {}, "madpo": {}}}))
    left = {one.artifact for one in checked(f"{SEED}/methods") if one.state == "unclaimed"}
    assert left and all(path.startswith(f"{SEED}/methods/marlhf/") for path in left)
    assert is_well(checked(f"{SEED}/methods")) and is_well(checked(f"{SEED}/reward_models"))


def test_inputs_that_were_not_copied_are_told_and_no_mistake(project):
    shutil.rmtree("results/models")
    done = run("verify", "results/mine")
    assert done.exit_code == 0
    assert "results/models/tiny: is not here, so what was made from it was not compared with it" in done.stdout


def test_results_that_lie_elsewhere_are_compared_with_the_configuration_here(project, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy of") / "results"
    shutil.copytree("results", copy)
    shutil.rmtree("results")
    assert found(copy) == {}
    configure(preferences={"default": {"pairs_per_task": 2}})
    assert list(found(copy / "mine")) == [PAIRS]


def test_an_experiment_that_the_configuration_does_not_list_is_compared_with_its_own_file(project):
    configure("second")
    write("config/config.yaml", "experiments: [second]\n")
    assert found() == {}
    Path("config/experiments/mine.yaml").unlink()
    assert {one.state for one in checked("results/mine")} == {"unclaimed"}


def test_one_artifact_can_be_checked_alone(project):
    assert [one.artifact for one in checked(POLICY)] == [POLICY]
    assert [one.artifact for one in checked("results/models/tiny")] == ["results/models/tiny"]


def test_work_in_progress_is_no_artifact(project):
    begin(job_of(POLICY), "artifacts/policy.manifest.json")
    assert found() == {}


def test_findings_can_be_read_by_programs(project):
    configure(preferences={"default": {"pairs_per_task": 2}})
    told = json.loads(run("verify", "results", "--json").stdout)
    assert told["well"] is False and told["counts"]["different"] == 1
    (pairs,) = [one for one in told["artifacts"] if one["state"] == "different"]
    assert pairs["artifact"] == PAIRS and pairs["stage"] == "pair"
    assert pairs["differences"] == [{"key": "pair.pairs_per_task", "recorded": "3", "present": "2"}]


def test_many_files_that_are_damaged_are_told_in_a_few_lines(project):
    finding = next(one for one in checked() if one.artifact == POLICY)
    finding.state, finding.problems = "broken", [f"file {number}" for number in range(20)]
    told = list(verification_text([finding]))
    assert len(told) < 10 and told[-2] == "  and 15 more (--json lists all)" and told[-1] == "1 artifact: 1 broken"


@pytest.mark.parametrize("folder", ["config", "results/nowhere", f"{POLICY}/agent_0"])
def test_a_folder_that_holds_no_artifacts_is_a_mistake(project, folder):
    with pytest.raises(UserError, match=r"is no results|holds no artifact"):
        checked(folder)


# --- status -------------------------------------------------------------------------------------------------------


def test_a_finished_experiment_is_done(project):
    assert {one.state for one in states().values()} == {"done"} and not any(one.runs for one in states().values())
    done = run("status")
    assert done.exit_code == 0 and done.stdout.startswith(f"mine: {len(states())} jobs, 0 would run\n")


def test_an_experiment_can_be_asked_for_by_name(project):
    assert run("status", "mine").stdout == run("status").stdout
    assert "no experiment 'other'" in str(run("status", "other").exception)


def test_an_experiment_that_was_never_run_is_missing_and_would_run(project):
    shutil.rmtree("results")
    assert {one.state for one in states().values()} == {"missing"} and all(one.runs for one in states().values())
    assert "not made yet: prepare 2, split 1, sample 1," in run("status").stdout


def test_a_changed_setting_is_stale_with_all_that_follows(project):
    configure(preferences={"default": {"pairs_per_task": 2}})
    found = states()
    assert found["pair (default, seed 0)"].why == "pair.pairs_per_task: 3 -> 2"
    assert found["replay (madpo, seed 0)"].why == "follows pair (default, seed 0)"
    stale = {title for title, one in found.items() if one.state == "stale"}
    assert stale == {title for title, one in found.items() if one.runs}
    assert "report" in stale and not {"split", "sample (default, seed 0)", "evaluate (base, seed 0)"} & stale


def test_a_folder_that_is_gone_while_its_manifest_stays_is_noticed(project):
    shutil.rmtree(POLICY)
    policy = states()["optimize (madpo, seed 0)"]
    assert (policy.state, policy.why, policy.runs) == ("missing", "policy is gone, its manifest is not", False)
    assert f"(snakemake --cores all {POLICY} makes it again)" in run("status").stdout


def test_a_file_that_is_cut_is_noticed(project):
    write(f"{POLICY}/agent_0/weights", "cut")
    assert states()["optimize (madpo, seed 0)"].why.startswith("agent_0/weights is missing or has another size")


def test_what_is_missing_with_its_manifest_runs_with_all_that_follows(project):
    remove(POLICY)
    runs = {title for title, one in states().items() if one.runs}
    assert {"card (madpo, seed 0)", "export (madpo, seed 0)", "optimize (madpo, seed 0)", "report"} <= runs
    assert not any("marlhf" in title for title in runs)


def test_a_folder_that_was_deleted_to_save_space_runs_when_something_needs_it(project):
    shutil.rmtree(POLICY)
    remove(f"{SEED}/methods/madpo/card.md")
    assert {title for title, one in states().items() if one.runs} == {"card (madpo, seed 0)"}
    remove(f"{SEED}/methods/madpo/export")
    assert states()["optimize (madpo, seed 0)"].runs


def test_a_training_log_that_is_lost_alone_is_told_and_runs_nothing(project):
    log = f"{SEED}/methods/madpo/round001/training_log.parquet"
    remove(log)
    optimize = states()["optimize (madpo, seed 0)"]
    assert (optimize.state, optimize.why, optimize.runs) == ("missing", "not made yet", False)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([], "goes on: begun"),
        (["checkpoints/step_00000012/state.json"], "goes on: checkpoint of step 12"),
        (["shards/000000.parquet", "shards/000001.parquet"], "goes on: 2 shards"),
        (["complete.json"], "goes on: finished, not yet in place"),
    ],
)
def test_unfinished_work_is_partial_with_its_progress(project, files, told):
    job = job_of(POLICY)
    remove(POLICY)
    begin(job, *files)
    policy = states()["optimize (madpo, seed 0)"]
    assert (policy.state, policy.why) == ("partial", told)


def test_unfinished_work_of_other_settings_counts_for_nothing(project):
    job = job_of(POLICY)
    remove(POLICY)
    begin(job, "shards/000000.parquet", code="other")
    assert states()["optimize (madpo, seed 0)"].state == "missing"


def test_a_stage_at_work_is_told_with_host_and_pid(project):
    job = job_of(POLICY)
    remove(POLICY)
    with pytest.raises(Stop), opened(job):
        policy = states()["optimize (madpo, seed 0)"]
        raise Stop
    assert policy.state == "partial" and policy.runs and policy.why.startswith("in work (")


def test_every_artifact_is_listed_on_demand(project):
    shutil.rmtree(POLICY)
    text = "\n".join(status_text("mine", list(states().values()), every_artifact=True))
    assert all(path in text for path in present().makers)
    assert f"missing  {POLICY}  (policy is gone, its manifest is not)" in text
    assert run("status", "--long").stdout == text + "\n"


# --- accept -------------------------------------------------------------------------------------------------------


def acceptance(folder):
    return acceptance_of(*beside_configuration(folder))


def test_code_and_versions_can_be_accepted(project):
    edit_provenance(POLICY, **{"code": "old", "versions.torch": "1.0"})
    edit_provenance("results/models/tiny", code="old")
    differences = acceptance("results/mine").differences
    assert {path: [one.key for one in found] for path, found in differences.items()} == {
        "results/models/tiny": ["code"],
        POLICY: ["code", "versions.torch"],
    }


def test_only_the_folder_and_what_it_was_made_from_is_accepted(project):
    for path in (POLICY, f"{SEED}/methods/marlhf/round001/policy", PAIRS):
        edit_provenance(path, code="old")
    assert list(acceptance(f"{SEED}/methods/madpo").differences) == [PAIRS, POLICY]


@pytest.mark.parametrize("key", ["pair.pairs_per_task", "schema.version", "pair.new_key"])
def test_a_changed_setting_is_refused_and_named(project, key):
    edit_provenance(PAIRS, **{key: "9"})
    done = run("accept", "results/mine")
    assert done.exit_code == 1 and isinstance(done.exception, UserError)
    assert f"{PAIRS}: {key}: 9 -> " in str(done.exception)
    assert "accepted_from" not in beside(Path(PAIRS), "provenance").read_text()


def test_a_changed_setting_before_the_folder_is_refused_too(project):
    edit_provenance(PAIRS, **{"pair.min_gap": "9"})
    with pytest.raises(UserError, match=r"pair\.min_gap: 9"):
        acceptance(f"{SEED}/methods/madpo/round001")
    assert acceptance(f"{SEED}/collections").differences == {}


def test_damage_and_other_inputs_are_refused(project):
    write(f"{POLICY}/agent_0/weights", "other")
    do(job_of(PAIRS), "other")
    with pytest.raises(UserError, match="are damaged, and must be made again") as refused:
        acceptance("results/mine")
    assert f"{POLICY}/agent_0/weights: has changed" in str(refused.value) and "input pairs" in str(refused.value)


def test_a_folder_that_was_deleted_to_save_space_is_accepted_by_its_manifest(project):
    shutil.rmtree(POLICY)
    edit_provenance(POLICY, code="old")
    assert list(acceptance("results/mine").differences) == [POLICY]


def test_what_was_not_made_yet_is_left_out(project):
    remove("results/mine/report")
    assert "report" not in [job.stage for job in acceptance("results/mine").jobs]


def test_nothing_is_written_where_snakemake_refuses(project):
    edit_provenance(POLICY, code="old")
    write("Snakefile", "this is no Snakefile\n")
    before = beside(Path(POLICY), "provenance").read_text()
    done = run("accept", "results/mine")
    assert "snakemake --touch failed, so nothing was accepted" in str(done.exception)
    assert beside(Path(POLICY), "provenance").read_text() == before


# --- prune --------------------------------------------------------------------------------------------------------


def test_unfinished_work_that_a_job_goes_on_from_is_kept(project):
    job = job_of(POLICY)
    remove(POLICY)
    partial = begin(job, "checkpoints/step_00000003/state.json")
    done = run("prune", "--yes")
    assert done.stdout.splitlines()[-1] == "nothing to delete" and partial.is_dir()
    assert f"{partial}  (goes on: checkpoint of step 3)" in done.stdout


@pytest.mark.parametrize(
    ("left", "why"),
    [
        ({"code": "old"}, "of other settings, code or inputs"),
        ({}, "its artifact is finished"),
    ],
)
def test_unfinished_work_that_no_job_goes_on_from_is_deleted(project, left, why):
    job = job_of(POLICY)
    if left:
        remove(POLICY)
    partial = begin(job, "shards/000000.parquet", **left)
    dry = run("prune")
    assert partial.is_dir() and why in dry.stdout
    assert dry.stdout.splitlines()[-1].startswith("deleted nothing (")
    done = run("prune", "--yes")
    assert done.exit_code == 0 and not partial.exists()
    assert done.stdout.splitlines()[-1].startswith("deleted 1 folder, ")


def test_unfinished_work_of_a_seed_that_is_gone_is_deleted_and_results_stay(project):
    partial = begin(job_of(POLICY))
    configure(seeds=[7])
    before = {path for path in Path("results").rglob("*") if ".partial" not in str(path)}
    assert "of no job of the present configuration" in run("prune", "results/mine", "--yes").stdout
    assert not partial.exists() and {path for path in Path("results").rglob("*")} == before


def test_work_that_a_stage_holds_is_never_deleted(project):
    job = job_of(POLICY)
    with pytest.raises(Stop), opened(job, code="other") as work:
        done = run("prune", "--yes")
        assert work.partial.is_dir() and (work.partial / "key").exists()
        raise Stop
    assert "(in use: " in done.stdout and done.stdout.endswith("nothing to delete\n")


def test_work_whose_input_is_being_made_is_kept(project):
    job = job_of(POLICY)
    remove(POLICY)
    partial = begin(job)
    remove(PAIRS)
    assert f"not known: {PAIRS} is not here" in run("prune", "--yes").stdout and partial.is_dir()


def test_a_folder_that_no_stage_made_is_left_alone(project):
    write("results/mine/notes.partial/notes.txt", "mine")
    (project / "results/link.partial").symlink_to(project / "config", target_is_directory=True)
    assert run("prune", "--yes").stdout == "nothing to delete\n"
    assert Path("results/mine/notes.partial/notes.txt").exists()


def test_what_a_stage_left_at_its_very_end_is_deleted(project):
    empty = Path(job_of(POLICY).partial)
    empty.mkdir()
    run("prune", "--yes")
    assert not empty.exists()


def keeping(**changes):
    """Let marlhf keep its checkpoints; returns the job of its policy."""
    method = {"keep_checkpoints": True, "schedule_steps": 100, **changes}
    configure(methods={"marlhf": method})
    return job_of(KEPT_POLICY)


def keep_a_checkpoint(job):
    """Leave the checkpoint of a finished run behind, as a training with keep_checkpoints does."""
    folder = present().kept_checkpoints(job)
    write(folder / "step_00000007/state.json", "12345")
    return folder


def test_kept_checkpoints_stay_while_a_longer_run_goes_on_from_them(project):
    folder = keep_a_checkpoint(keeping())
    keeping(epochs=9)
    done = run("prune", "--yes")
    assert f"{folder.relative_to(project)}  (more epochs go on: checkpoint of step 7)" in done.stdout
    assert done.stdout.splitlines()[-1] == "nothing to delete" and folder.is_dir()


@pytest.mark.parametrize("changes", [{"learning_rate": 0.5}, {"keep_checkpoints": False}])
def test_kept_checkpoints_that_no_run_goes_on_from_are_deleted(project, changes):
    folder = keep_a_checkpoint(keeping())
    keeping(**changes)
    assert "checkpoints of other settings, code or inputs, or of a method that keeps none" in run("prune").stdout
    assert folder.is_dir()
    assert run("prune", "--yes").stdout.splitlines()[-1].startswith("deleted 1 folder, ")
    assert not folder.parent.exists() and Path(KEPT_POLICY).is_dir()


def test_kept_checkpoints_of_a_seed_that_is_gone_are_deleted(project):
    folder = keep_a_checkpoint(keeping())
    configure(seeds=[7])
    assert "checkpoints of no job of the present configuration" in run("prune", "results/mine", "--yes").stdout
    assert not folder.exists()


def test_kept_checkpoints_are_no_artifact_and_no_damage(project):
    before = found(), states().keys()
    keep_a_checkpoint(job := keeping())
    do(job)
    configure()
    do(job_of(KEPT_POLICY))
    assert (found(), states().keys()) == before


def test_kept_checkpoints_of_a_run_at_work_are_left_alone(project):
    folder = keep_a_checkpoint(job := keeping())
    keeping(learning_rate=0.5)
    with pytest.raises(Stop), opened(job, code="other"):
        done = run("prune", "--yes")
        raise Stop
    assert f"{folder.relative_to(project)}  (in use: " in done.stdout and folder.is_dir()


def test_the_progress_of_a_run_that_keeps_its_checkpoints_is_told(project):
    job = keeping()
    do(job)
    remove(KEPT_POLICY)
    begin(job)
    keep_a_checkpoint(job)
    assert states()["optimize (marlhf, seed 0)"].why == "goes on: checkpoint of step 7"


def test_a_terminal_is_asked(project, monkeypatch):
    partial = begin(job_of(POLICY))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    questions = []
    assert list(prune(present(), "results", asking(False, lambda text: questions.append(text) or False)))
    assert partial.is_dir() and questions[0].startswith("Delete 1 folder of unfinished work and old checkpoints (")
    list(prune(present(), "results", asking(False, lambda text: True)))
    assert not partial.exists()
