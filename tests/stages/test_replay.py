"""The replay stage: which pairs train, in which order."""

from .conftest import counts_of, rows_of


def test_each_pair_of_the_only_round_trains_once_in_its_order(pipeline):
    rows = rows_of(pipeline.training_pairs)
    assert [row["pair_id"] for row in rows] == [row["pair_id"] for row in rows_of(pipeline.pairs)]
    assert [row["draw"] for row in rows] == list(range(len(rows)))
    assert {(row["from_round"], row["age"], row["round_weight"]) for row in rows} == {(1, 0, 1.0)}
    assert counts_of(pipeline.training_pairs) == {"rows": len(rows)}
