from pathlib import Path

from comlrl_stages.reporting import records
from comlrl_stages.reporting.records import Owner

from .synthetic import make_experiment


def test_an_artifact_belongs_to_what_its_path_names():
    owner = records.owner_of(Path("/home/models/x/results/demo/seed3/methods/madpo/round002/policy"))
    assert owner == Owner("method", "madpo", 3, 2) and str(owner) == "madpo"
    assert (
        str(records.owner_of(Path("results/demo/seed0/reward_models/v1.5.training_log.parquet"))) == "reward model v1.5"
    )
    assert records.owner_of(Path("results/demo/split/train.parquet")) == Owner("data", "", None, None)


def test_everything_upstream_is_found(tmp_path):
    _, inputs = make_experiment(tmp_path / "results", methods=("base", "madpo"), seeds=(0,))
    found = {record.name: record for record in records.collect(inputs["evaluations"])}
    assert {"models/tiny", "demo/split/train.parquet", "demo/seed0/preferences/default/pairs.parquet"} <= set(found)
    policy = found["demo/seed0/methods/madpo/round002/policy"]
    assert (policy.stage, policy.code, policy.versions) == ("optimize", "0123456789abcdef", {"torch": "2.13.0"})
    assert policy.resolved == {"compute_dtype": "float32", "device": "cpu"}


def test_a_stage_with_several_outputs_spent_its_time_once(tmp_path):
    _, inputs = make_experiment(tmp_path / "results", methods=("madpo",), seeds=(0,))
    trained = [r for r in records.runs(records.collect(inputs["training_logs"])) if r.stage == "optimize"]
    assert [record.owner.round for record in trained] == [1, 2]
    assert sum(record.wall_s for record in trained) == 190.0


def test_drops_are_summed_over_seeds_and_zero_is_no_row(tmp_path):
    _, inputs = make_experiment(tmp_path / "results", methods=("madpo",), seeds=(0, 1))
    rows = records.dropped(records.collect(inputs["evaluations"]))
    assert ("pair", "preferences default", "equal_reward", 28) in rows
    assert ("split", "data", "too_long", 2) in rows


def test_rounds_are_folded_into_a_pipeline_without_cycles(tmp_path):
    _, inputs = make_experiment(tmp_path / "results", methods=("base", "madpo"), seeds=(0, 1))
    graph = records.pipeline(records.collect(path for paths in inputs.values() for path in paths))
    assert graph.nodes["method/madpo/optimize"].runs == 4
    assert ("method/madpo/refer", "method/madpo/optimize") in graph.edges
    assert ("preferences/default/pair", "reward model/wide/reward") in graph.edges
    assert all(source != target for source, target in graph.edges)
