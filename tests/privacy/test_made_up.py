"""Made-up records are valid wherever the records of a data set are."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.randomness import Stream, stream
from fedp3.data import batch, from_tensors
from fedp3.privacy.made_up import made_up_records


@given(
    data=st.data(),
    columns=st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 9)), min_size=1, max_size=4),
    records=st.integers(2, 30),
    seed=st.integers(0, 5),
)
def test_each_number_is_within_its_own_range_and_whole_where_it_is_always_whole(
    data: st.DataObject, columns: list[tuple[int, int]], records: int, seed: int
) -> None:
    fractions = data.draw(st.lists(st.booleans(), min_size=len(columns), max_size=len(columns)))
    rng = torch.Generator().manual_seed(seed)
    x = torch.stack(
        [
            torch.randint(low, low + size + 1, (records,), generator=rng)
            + torch.rand(records, generator=rng) * fraction
            for (low, size), fraction in zip(columns, fractions, strict=True)
        ],
        1,
    )
    own = from_tensors(x, torch.zeros(records, dtype=torch.int64))
    if bool((x == x[0]).all()):
        return  # the tests below are about constant data
    made_up = made_up_records(own, 50, stream(seed, Stream.INIT))
    assert bool((made_up >= x.amin(0)).all()) and bool((made_up <= x.amax(0)).all())
    for column, values in zip(x.T, made_up.T, strict=True):
        if bool((column == column.round()).all()):
            assert bool((values == values.round()).all())
        assert len(values.unique()) > 1 or len(column.unique()) == 1


def test_token_ids_reach_both_ends_of_their_range() -> None:
    tokens = torch.randint(3, 8, (40, 5), generator=torch.Generator().manual_seed(0))
    made_up = made_up_records(
        from_tensors(tokens, torch.zeros(40, dtype=torch.int64)), 200, stream(0, Stream.INIT)
    )
    assert set(made_up.unique().tolist()) == {3.0, 4.0, 5.0, 6.0, 7.0}


def test_pixels_are_made_up_as_a_network_reads_them() -> None:
    pixels = torch.randint(256, (40, 1, 4, 4), generator=torch.Generator().manual_seed(0))
    images = from_tensors(pixels.to(torch.uint8), torch.zeros(40, dtype=torch.int64))
    made_up = made_up_records(images, 20, stream(0, Stream.INIT))
    read = batch(images, torch.arange(40))
    assert made_up.dtype == read.dtype and bool((made_up <= read.amax(0)).all())
    assert len(made_up.unique()) > 300, "and not only the 256 levels"


def test_the_single_example_of_a_server_gives_the_range_of_all_of_its_numbers() -> None:
    example = from_tensors(torch.arange(6.0)[None], torch.zeros(1, dtype=torch.int64), classes=2)
    made_up = made_up_records(example, 100, stream(0, Stream.INIT))
    assert set(made_up.unique().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}


def test_a_constant_example_gives_records_that_differ() -> None:
    example = from_tensors(torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64), classes=2)
    made_up = made_up_records(example, 100, stream(0, Stream.INIT))
    assert len(made_up.unique()) > 500
