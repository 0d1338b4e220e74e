"""What sequence parallelism and a loss over a cut vocabulary send and keep, counted by torch's profiler."""

import pytest

from .counted import loss_of_cut_vocabulary, step

_VOCABULARY = 960  # larger than the tokens, as it is


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_stream_between_blocks_is_cut_and_sends_no_more(ranks, world):
    """Halves of all-reduces in place of all-reduces; each rank's norms compute on 1/n of the stream."""
    whole, cut = (ranks(world, step, sequence, _VOCABULARY, timeout=170) for sequence in (False, True))
    for tensor, sequence in zip(whole, cut, strict=True):
        assert sequence.activations + sequence.gradients <= tensor.activations + tensor.gradients
        assert [n * world for n in sequence.norms] == list(tensor.norms)


def test_an_all_reduce_per_pair_of_cut_layers_and_nothing_of_the_size_of_the_vocabulary(ranks):
    """2 blocks of 2 pairs, forward and backward, the embedding and the head: 10 tensors of the stream."""
    stream, share = 2 * 24 * 48 * 4, 2 * (2 - 1) / 2
    for counted in ranks(2, step, False, _VOCABULARY, timeout=170):
        assert (counted.activations, counted.collectives) == (10 * stream * share, 10)
        assert counted.gradients == 5 * 48 * 4  # of the norms


@pytest.mark.parametrize("world", [2, 3])
def test_a_loss_over_a_cut_vocabulary_sends_a_few_numbers_per_row(ranks, world):
    """As many for any vocabulary, also one that the ranks do not divide; for twice the rows, twice these."""
    sent = {
        (vocabulary, rows): ranks(world, loss_of_cut_vocabulary, vocabulary, rows, timeout=170)[0]
        for vocabulary in (960, 4099)
        for rows in (8, 16)
    }
    assert all(right for _, _, right in sent.values())
    assert len({sent[960, rows][0] - sent[4099, rows][0] for rows in (8, 16)}) == 1
    assert sent[4099, 16][0] == 2 * sent[4099, 8][0] == 2 * sent[960, 8][0]
    assert sent[4099, 8][0] < sent[4099, 8][1] / 100
