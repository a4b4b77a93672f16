"""Every form of an async save: snapshot, finalized, found, and loaded bit for bit by a fresh process after a kill."""

import pytest

pytestmark = pytest.mark.multiprocess
#: form -> the last step that it saves; from which release on it is there
FORMS = {
    "direct": (1, "0.15"),
    "direct_wrapped_cached": (3, "0.15"),
    "short": (1, "0.15"),
    "short_at_once": (1, "0.15"),
    "short_wrapped_cached": (3, "0.15"),
    "persistent": (2, "0.18"),
    "nvrx_direct": (1, "0.18"),
    "nvrx_direct_wrapped_cached": (3, "0.18"),
    "nvrx_short_at_once": (1, "0.18"),
}


@pytest.fixture
def forms(job):
    """What each rank says of each form that the release has, when it saves and when a fresh process loads."""
    return [
        (form, saved, loaded)
        for form, (_, since) in FORMS.items()
        if job.release >= since
        for saved, loaded in zip(
            job.said("forms_worker", 2, "save", form), job.said("forms_worker", 2, "load", form), strict=True
        )
    ]


def test_a_fresh_process_finds_the_last_version_of_each_form(forms):
    assert [(form, loaded["latest"]) for form, _, loaded in forms] == [
        (form, f"step-{FORMS[form][0]}_ckpt") for form, _, _ in forms
    ]


def test_it_loads_what_was_there_when_the_save_was_called_bit_for_bit(forms):
    assert [(form, loaded["digest"]) for form, _, loaded in forms] == [
        (form, saved["digest"]) for form, saved, _ in forms
    ]
    assert len({saved["digest"] for _, saved, _ in forms}) == len(forms)


def test_the_common_state_comes_back_too(forms):
    assert [loaded["common"] for _, _, loaded in forms] == [[FORMS[form][0], [1, None, "x"]] for form, _, _ in forms]


def test_no_form_has_a_folder_that_counts_before_its_request_was_finalized(forms):
    assert [form for form, saved, _ in forms if saved["early"]] == []


def test_a_request_is_of_the_kind_that_was_asked_for(forms):
    for form, saved, _ in forms:
        assert saved["kind"].startswith("nvidia_resiliency_ext." if form.startswith("nvrx") else "megatron.core.")
