"""Say which pairs train, and in which order. With one round these are its pairs, each once, as they stand."""

from comlrl_stages.artifacts import PAIRS, TRAINING_PAIRS, Work, read_table, table_of, write_table
from comlrl_stages.settings import ReplaySettings


def run(settings: ReplaySettings, work: Work) -> None:
    """Write the table `training_pairs`."""
    pairs = read_table(work.inputs["pairs"], PAIRS)
    rows = [
        {"draw": draw, "pair_id": pair_id, "from_round": settings.round, "age": 0, "round_weight": 1.0}
        for draw, pair_id in enumerate(pairs["pair_id"].to_pylist())
    ]
    write_table(work.output("training_pairs"), table_of(rows, TRAINING_PAIRS), TRAINING_PAIRS)
    work.count("training_pairs", rows=len(rows))
