import pickle

from mlflashpoint import errors


def test_an_error_is_one_line_that_names_setting_rank_step_path_and_remedy():
    error = errors.StoreFullError(
        "too small\nby far",
        setting="MLFLASHPOINT_BASE_CONTAINER",
        value="/dev/shm/x",
        rank=3,
        step=7,
        path="/p",
        remedy="enlarge it",
    )
    assert str(error) == (
        "too small by far [MLFLASHPOINT_BASE_CONTAINER='/dev/shm/x', rank 3, step 7, path /p]; remedy: enlarge it"
    )


def test_an_error_keeps_its_fields_when_it_crosses_a_process_boundary():
    error = pickle.loads(pickle.dumps(errors.PeerError("gone", rank=0, step=0)))
    assert (type(error), error.rank, error.step, str(error)) == (errors.PeerError, 0, 0, "gone [rank 0, step 0]")


def test_a_very_long_value_is_shortened_in_the_message():
    error = errors.SettingError("out of range", setting="MLFLASHPOINT_REPLICAS", value="9" * 5000)
    assert len(str(error)) < 400 and "5002 characters" in str(error)
