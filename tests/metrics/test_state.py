import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.metrics.metric import State, fold, pack, unpack


def state_of(count: int, values: list[float]) -> State:
    return {"count": torch.tensor(count), "counts": torch.tensor([count, 1]), "values": torch.tensor(values)}


def test_integers_add_and_floats_are_joined() -> None:
    folded = fold([state_of(2, [0.5]), state_of(3, [0.25, -1.0]), state_of(-1, [])])
    assert folded["count"].item() == 4
    assert folded["counts"].tolist() == [4, 3]
    assert folded["counts"].dtype == torch.int64
    assert folded["values"].tolist() == [0.5, 0.25, -1.0]


def test_rows_are_joined_along_the_first_axis() -> None:
    folded = fold([{"rows": torch.zeros(2, 3)}, {"rows": torch.ones(1, 3)}])
    assert folded["rows"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]


def test_one_state_is_itself_and_no_state_is_empty() -> None:
    alone = state_of(2, [0.5])
    assert all(torch.equal(alone[name], value) for name, value in fold([alone]).items())
    assert fold([]) == {}


def test_the_states_are_left_as_they_were() -> None:
    states = [state_of(2, [0.5]), state_of(3, [0.25])]
    fold(states)
    assert states[0]["count"] == 2
    assert states[0]["values"].tolist() == [0.5]


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.lists(st.floats(width=32, allow_nan=False))), min_size=2),
    st.data(),
)
def test_neighbors_may_be_folded_first(parts: list[tuple[int, list[float]]], data: st.DataObject) -> None:
    states = [state_of(*part) for part in parts]
    cut = data.draw(st.integers(1, len(states) - 1))
    whole, halves = fold(states), fold([fold(states[:cut]), fold(states[cut:])])
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_packed_states_come_back_as_they_were() -> None:
    state = {**state_of(2, [0.5, -0.0, float("nan")]), "double": torch.zeros(0, 3, dtype=torch.float64)}
    packed = pack(state)
    assert (packed.dtype, packed.ndim) == (torch.uint8, 1)
    returned = unpack(packed)
    assert returned.keys() == state.keys()
    for name, value in state.items():
        assert returned[name].dtype == value.dtype
        assert returned[name].shape == value.shape
        assert returned[name].numpy().tobytes() == value.numpy().tobytes()


def test_no_state_packs_into_nothing() -> None:
    assert len(pack({})) == 0
    assert unpack(pack({})) == {}
